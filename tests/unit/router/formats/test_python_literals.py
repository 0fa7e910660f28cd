"""Python literals in pieces, against the standard library's idea of them."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import random
import tokenize
import warnings
from typing import Any

import pytest
from support.budget import budget, seeded

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import PieceKind, content_of
from penstock_router.text.formats.registry import FORMATS

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


def scan(text: str, num_characters: int = 1_000_000) -> tuple[str, str]:
    """The JSON of `text` as an argument that comes in parts, and what is no part of the call."""
    parser = FORMATS["pythonic"].parser([Tool("f")])
    whole = f"[f(a={text})]"
    parts = (whole[at : at + num_characters] for at in range(0, len(whole), num_characters))
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.flush()
    said = "".join(piece.text for piece in pieces if piece.kind is PieceKind.ARGUMENTS)
    return said.removeprefix('{"a": '), content_of(pieces)


def test_what_python_writes_is_read_as_json_has_it() -> None:
    rng = seeded("values")
    for _ in range(budget(1_000, 30_000)):
        meant = value(rng)
        text = repr(meant)
        said, content = scan(text)
        assert content == "", text
        assert json.loads(said.removesuffix("}")) == json.loads(json.dumps(meant)), text
        assert scan(text, 1) == (said, content), text


def test_a_mutated_literal_raises_nothing_and_means_what_python_takes_it_for() -> None:
    rng = seeded("mutations")
    for _ in range(budget(1_000, 100_000)):
        text = repr(value(rng, tuples=False))
        at = rng.randint(0, len(text))
        scrap = rng.choice([*"\"'\\{}[],:01.e+-_xNTr \n", "True", "\\x4", "\\N{", '"""', "None"])
        text = text[:at] + scrap + text[at + rng.randint(0, 2) :]
        said, content = scan(text)
        assert scan(text, 1) == (said, content), text
        if not content and said.endswith("}"):
            said = said.removesuffix("}")
            assert json.dumps(json.loads(said)) == _pythons(text, said), text


def _pythons(text: str, said: str) -> str:
    """Return the JSON of the value that Python reads in `text`. Return the JSON `said` if Python
    refuses the text (for instance for a line break in quotes), or if two strings stand side by
    side.
    """
    if _has_neighbours(text):
        return json.dumps(json.loads(said))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return json.dumps(json.loads(json.dumps(ast.literal_eval(text.strip(" \n,")))))
        except (SyntaxError, ValueError, TypeError, RecursionError):
            return json.dumps(json.loads(said))


def _has_neighbours(text: str) -> bool:
    """Tell whether two strings stand side by side."""
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        tokens = tokenize.generate_tokens(io.StringIO(text.strip(" \n,")).readline)
        kinds = [token.type for token in tokens if token.type != tokenize.NL]
        return (tokenize.STRING, tokenize.STRING) in itertools.pairwise(kinds)
    return False


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
        ("007", "7"),
        ("-0012", "-12"),
        ("'it's'", '"it\'s"'),
        ("'a, 'b', c'", "\"a, 'b', c\""),
        ("'print('x')'", "\"print('x')\""),
        ("['it's', 'he's']", '["it\'s", "he\'s"]'),
        ("{'it's': 'he said 'no''}", '{"it\'s": "he said \'no\'"}'),
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
    assert scan(text) == (said + "}", "")
    assert scan(text, 1) == (said + "}", "")


@pytest.mark.parametrize(
    "text",
    [
        *("x", "f(1)", "1+1", "{1}", "[1,,2]", "b'x'", "f'{x}'", "1e999999x", "+inf", "nan", "1j"),
        *("{True: 1}", "{[1]: 2}", "'\\xg'", "'\\N{NO SUCH THING}'", "'\\U00110000'", "", "[1 2]"),
    ],
)
def test_what_is_no_literal_fails(text: str) -> None:
    assert scan(text)[1].endswith(")]")
    assert scan(text, 1) == scan(text)


def test_a_word_that_is_too_long_for_a_number_is_none() -> None:
    assert scan("1" * 400) == ("1" * 400 + "}", "")
    assert scan("1" * 401) == ("", "[f(a=" + "1" * 401 + ")]")


def test_nesting_is_read_to_a_hundred_levels() -> None:
    assert scan("[" * 100 + "]" * 100)[1] == ""
    assert scan("[" * 101 + "]" * 101) == ("[" * 100, "[" + "]" * 101 + ")]")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("12", "12"),
        ("[1, 'it", '[1, "it'),
        ("[1, ", "[1"),
        ("'a\\", '"a\\'),
        ("{'a': Tr", '{"a": Tr'),
    ],
)
def test_a_value_that_is_cut_off_is_shown_as_far_as_it_came(text: str, said: str) -> None:
    parser = FORMATS["pythonic"].parser([Tool("f")])
    pieces = [*parser.feed(f"[f(a={text}"), *parser.flush(was_cut=True)]
    assert content_of(pieces) == ""
    arguments = [piece.text for piece in pieces if piece.kind is PieceKind.ARGUMENTS]
    assert "".join(arguments) == '{"a": ' + said
