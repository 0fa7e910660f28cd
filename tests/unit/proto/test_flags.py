"""The parts that command lines have in common: keys, flags, variables, values and help."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock_common.flags import (
    as_size,
    flag,
    number,
    parser_of,
    read_flags,
    required,
    size,
    size_with_unit,
    usable_key,
)
from penstock_common.shared_flags import quiet_grpc


@pytest.mark.parametrize("key", ["k", "sk-5ecret", "two words", "~!@#$%^&*()"])
def test_a_key_is_what_a_header_can_carry(key: str) -> None:
    assert usable_key(key) == key


@pytest.mark.parametrize(
    "key", ["", " ", " k", "k ", "k\n", "a\nb", "a\x7fb", "schlüssel", "k\udce9"]
)
def test_a_key_that_is_none_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        usable_key(key)
    assert str(refused.value) == (
        "a key is printable ASCII, not empty, without spaces around it; leave it out to do without"
    )


@pytest.mark.parametrize(("given", "found"), [(None, "NONE"), ("INFO", "INFO")])
def test_grpc_is_quiet_unless_its_variable_says_otherwise(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set first, so that what it becomes is undone.
    monkeypatch.setenv("GRPC_VERBOSITY", given or "")
    if given is None:
        del os.environ["GRPC_VERBOSITY"]
    quiet_grpc()
    assert os.environ["GRPC_VERBOSITY"] == found


def test_grpc_is_not_imported_before_it_is_told_to_be_quiet() -> None:
    code = "import sys, penstock_common.shared_flags; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- Flags as fields ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    level: str = flag("info", "how much is told", group="logs", choices=("info", "debug"))


@dataclass(frozen=True, slots=True)
class _Config(_Base):
    where: str = required("where it is; 100% of it", group="places", gather=",".join)
    names: tuple[str, ...] = flag((), "its names", several=True)
    pairs: tuple[tuple[str, ...], ...] = flag(
        (), "pairs", name="--pair", read=lambda text: tuple(text.split("=")), gather=tuple
    )
    secret: str | None = flag(
        None, "its key", read=usable_key, variables=("UNSET_KEY", "IT_KEY"), secret=True
    )
    lines: bool = flag(False, "lines", group="logs", negatable=True)
    memory: int = flag(
        2**28, "memory", group="limits", alias="--mem", read=size_with_unit, at_least=1
    )
    wait_s: float | None = flag(None, "how long", above=0, at_most=5)
    console: bool = flag(True, "no console", name="--no-console")
    derived: int = 0


_UNIT_MISSING = "must have its unit, K, M or G, as in 512M or 2G"


def _read(*argv: str) -> _Config:
    return _Config(**read_flags(_Config, parser_of(_Config, "it", ""), ["--where=a", *argv]))


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        ([], {}),
        (["--where", "b,c"], {"where": "a,b,c"}),
        (["--names", "a", "b", "--level=debug"], {"names": ("a", "b"), "level": "debug"}),
        (["--pair", "a=b", "--pair=c=d"], {"pairs": (("a", "b"), ("c", "d"))}),
        (["--lines"], {"lines": True}),
        (["--lines", "--no-lines"], {}),
        (["--memory", "3K", "--mem", "2g"], {"memory": 2**31}),
        (["--wait-s=5", "--no-console"], {"wait_s": 5.0, "console": False}),
        (["--secret", "k"], {"secret": "k"}),
    ],
)
def test_fields_are_what_their_flags_say_and_else_their_defaults(
    argv: list[str], fields: dict[str, Any]
) -> None:
    assert _read(*argv) == replace(_Config("a"), **fields)


def test_a_variable_stands_in_for_its_flag_and_is_named_where_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IT_KEY", "from-env")
    assert _read().secret == "from-env"
    assert _read("--secret", "given").secret == "given"
    assert "from-env" not in repr(_read())
    monkeypatch.setenv("IT_KEY", "a b ")
    with pytest.raises(SystemExit):
        _read()
    error = capsys.readouterr().err
    assert error.startswith("it: IT_KEY: a key is printable ASCII")
    assert "a b" not in error


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--names"], "argument --names: expected at least one argument"),
        (["--derived", "1"], "unrecognized arguments: --derived 1"),
        (["--console"], "unrecognized arguments: --console; did you mean --no-console?"),
        (
            ["--mem", "0K", "--memry=2G"],
            "argument --memory/--mem: must be a size such as 512M or 2G",
        ),
        (["--memry=2G"], "unrecognized arguments: --memry=2G; did you mean --memory?"),
        (["--lins", "--x"], "unrecognized arguments: --lins --x; did you mean --lines?"),
        (["--mem", "4"], f"argument --memory/--mem: {_UNIT_MISSING}, not '4' (see"),
        (
            ["--mem", "8589934592"],
            f"argument --memory/--mem: {_UNIT_MISSING}, not '8589934592'; as many bytes are 8G",
        ),
        (["--mem", "0"], "argument --memory/--mem: must be a size such as 512M or 2G, at least 1"),
        (["--mem=-1M"], "argument --memory/--mem: must be a size such as 512M or 2G, at least 1"),
        (["--wait-s=0"], "argument --wait-s: must be a number, above 0, at most 5, not '0'"),
        (["--level", "x" * 99], "argument --level: must be one of info, debug, not 'xxxxx"),
    ],
)
def test_what_is_no_value_is_refused_in_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _read(*argv)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"it: {said}")
    assert line.endswith(" (see it --help)")
    assert len(line) < 160


def test_a_flag_that_must_be_given_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_flags(_Config, parser_of(_Config, "it", ""), [])
    assert "required: --where" in capsys.readouterr().err


def test_what_must_be_given_and_is_misspelled_is_recognized(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read_flags(_Config, parser_of(_Config, "it", ""), ["--were", "a"])
    said = (
        "it: the following arguments are required: --where; did you mean --where? (see it --help)"
    )
    assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("0", 0), ("512M", 2**29), ("3K", 3072), ("2g", 2**31)]
)
def test_a_size_has_its_unit_and_is_written_as_it_is_read(text: str, num_bytes: int) -> None:
    assert size(text) == size_with_unit(text) == num_bytes
    assert as_size(num_bytes) == text.upper()


def test_a_flag_whose_name_says_bytes_takes_a_bare_number_of_them() -> None:
    assert size("607500") == 607_500
    with pytest.raises(argparse.ArgumentTypeError, match="must have its unit"):
        size_with_unit("607500")


def test_help_has_the_groups_and_the_defaults_and_what_is_inherited_last() -> None:
    told = parser_of(_Config, "it", "").format_help().partition("places:\n")[2]
    assert [line.split()[0] for line in told.splitlines() if line.strip()[:2] == "--"] == [
        *("--where", "--names", "--pair", "--secret", "--lines,", "--level", "--memory"),
        *("--wait-s", "--no-console"),
    ]
    for text in ("100% of it", "(default: off)", "(default: info)", "(default: 256M)", "limits:"):
        assert text in told
    assert told.count("logs:") == 1
    assert told.count("default") == 3


@pytest.mark.parametrize("text", ["1_000", " 1", "1 ", "\u0661", "nan", "inf", "", "1e999", "0x1"])
@pytest.mark.parametrize("kind", [int, float, size])
def test_a_number_is_written_as_everywhere_and_not_as_in_python_alone(kind: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        number(kind)(text)
