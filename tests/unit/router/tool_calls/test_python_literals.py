"""Python literals in pieces, against the standard library's idea of them."""

from __future__ import annotations

import ast
import json
import random
import warnings
from typing import Any

import pytest
from support.budget import budget, seeded

from penstock_router.text.tool_calls.python_literals import PythonScanner

_TEXTS = ["", "a", "it's", 'say "x"', "\\", "\n\t\x00\x07\x7f", "é東🌧\u2028", "}])", "''", '"""']
_LEAVES: list[Any] = [*_TEXTS, 0, -7, 10**30, 1.5, -2e-9, 1e22, True, False, None]


def value(rng: random.Random, depth: int = 0, *, tuples: bool = True) -> Any:
    kind = rng.random() if depth < 5 else 1.0
    count = rng.randint(0, 4)
    if kind < 0.6:
        values = [value(rng, depth + 1, tuples=tuples) for _ in range(count)]
        if kind < 0.25:
            return values
        if kind < 0.4:
            # One value in brackets is no tuple to Python, and is a list here.
            return tuple(values) if tuples and count != 1 else values
        # A number that is a key is a text of JSON's, spelt as it was.
        keys = [*_TEXTS, 1, -2.5] if tuples else _TEXTS
        return {rng.choice(keys): each for each in values}
    return rng.choice(_LEAVES)


def scan(parts: list[str]) -> tuple[str, str, bool, bool]:
    """The JSON, what was left, and how it ended."""
    scanner = PythonScanner()
    said = ""
    for at, part in enumerate(parts):
        stopped = scanner.feed(part)
        said += scanner.take_json()
        if stopped < len(part):
            return said, part[stopped:] + "".join(parts[at + 1 :]), scanner.complete, scanner.failed
    return said, "", scanner.complete, scanner.failed


def test_what_python_writes_is_read_as_json_has_it() -> None:
    rng = seeded("values")
    for _ in range(budget(1_000, 30_000)):
        meant = value(rng)
        text = repr(meant)
        said, rest, complete, failed = scan([text + ")"])
        assert (rest, complete, failed) == (")", True, False), text
        assert json.loads(said) == json.loads(json.dumps(meant)), text
        assert scan(list(text + ")")) == (said, rest, complete, failed), text


def test_a_mutated_literal_raises_nothing_and_means_what_python_takes_it_for() -> None:
    rng = seeded("mutations")
    for _ in range(budget(3_000, 100_000)):
        text = repr(value(rng, tuples=False))
        at = rng.randint(0, len(text))
        scrap = rng.choice([*"\"'\\{}[],:01.e+-_xNTr \n", "True", "\\x4", "\\N{", '"""', "None"])
        text = text[:at] + scrap + text[at + rng.randint(0, 2) :]
        whole = scan([text + " ;"])
        assert scan(list(text + " ;")) == whole, text
        said, rest, complete, _ = whole
        if complete:
            assert json.dumps(json.loads(said)) == _pythons(text, rest, said), text


def _pythons(text: str, rest: str, said: str) -> str:
    """What Python takes it for; `said` where it takes it for nothing, as a line break in quotes."""
    literal = (text + " ;")[: len(text) + 2 - len(rest)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return json.dumps(json.loads(json.dumps(ast.literal_eval(literal.strip()))))
        except (SyntaxError, ValueError, TypeError, RecursionError):
            return json.dumps(json.loads(said))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("true", "true"),
        ("null", "null"),
        ("1_000", "1000"),
        ("0xff", "255"),
        (".5", "0.5"),
        ("5.", "5.0"),
        ("+3", "3"),
        ("r'\\d\\''", '"\\\\d\\\\\'"'),
        ("'\\d\\/'", '"\\\\d/"'),
        ("'a\\\nb'", '"ab"'),
        ("'a\nb'", '"a\\nb"'),
        ('"""a"b""c"""', '"a\\"b\\"\\"c"'),
        ("''", '""'),
        ("'''x'''", '"x"'),
        ("(1, 2,)", "[1, 2]"),
        ("{1: 2, 'a': 3,}", '{"1": 2, "a": 3}'),
        ("'\\ud83d\\ude00'", '"\\ud83d\\ude00"'),
    ],
)
def test_forms_that_models_write(text: str, said: str) -> None:
    assert scan([text + ","]) == (said, ",", True, False)
    assert scan(list(text + ",")) == (said, ",", True, False)


@pytest.mark.parametrize(
    "text",
    [
        *("x", "f(1)", "1+1", "{1}", "[1,,2]", "b'x'", "f'{x}'", "1e999999x", "+inf", "nan", "1j"),
        *("{True: 1}", "{[1]: 2}", "'\\xg'", "'\\N{NO SUCH THING}'", "'\\U00110000'", "", "[1 2]"),
    ],
)
def test_what_is_no_literal_fails(text: str) -> None:
    assert scan([text + " ,"])[3]
    assert scan([text + " ,"]) == scan(list(text + " ,"))


def test_a_word_without_end_fails_at_a_bound() -> None:
    scanner = PythonScanner()
    assert scanner.feed("1" * 100_000) < 1_000
    assert scanner.failed
