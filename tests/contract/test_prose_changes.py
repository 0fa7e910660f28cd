"""The script that tells prose from programs."""

from __future__ import annotations

import pytest
from contract.prose_changes import differences

BEFORE = '''"""One."""
# two
def test_three(four: int = 4) -> str:
    """Five."""
    return f"six {four}"
'''


@pytest.mark.parametrize(
    ("was", "now", "kinds"),
    [
        ('"""One."""', '"""Another."""', []),
        ("# two", "# a comment\n# of two lines", []),
        ('    """Five."""\n', "", []),
        ("six", "seven", ["text"]),
        ("test_three", "test_of_three", ["name"]),
        ("= 4", "= 5", ["code"]),
        ("four: int", "five: int", ["code"]),
        ('f"six {four}"', 'f"six {four + 1}"', ["code"]),
        ('f"six {four}"', '"six"', ["code"]),
        ("# two\n", "import os\n", ["code"]),
        ("# two\n", "# mypy: strict\n", ["code"]),
        (
            "def test_three(four: int = 4) -> str:",
            "def test_three(four: int = 4) -> str:  # noqa",
            ["code"],
        ),
    ],
)
def test_what_a_change_is(was: str, now: str, kinds: list[str]) -> None:
    assert was in BEFORE
    found = differences("tests/test_a.py", BEFORE, BEFORE.replace(was, now))
    assert [kind for kind, _ in found] == kinds


def test_names_of_functions_are_code_but_for_those_of_tests() -> None:
    after = BEFORE.replace("test_three", "test_four")
    assert [kind for kind, _ in differences("shard/a.py", BEFORE, after)] == ["code"]


@pytest.mark.parametrize(
    ("after", "kinds"),
    [("// other\nint32 a = 1;", []), ("int32 a = 1;", []), ("int32 a = 2;", ["code"])],
)
def test_comments_of_the_wire_are_prose_and_its_fields_are_not(
    after: str, kinds: list[str]
) -> None:
    before = "// one\nint32 a = 1;"
    assert [kind for kind, _ in differences("a.proto", before, after)] == kinds
