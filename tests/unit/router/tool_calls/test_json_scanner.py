"""One JSON value in pieces, against the standard library's idea of JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.budget import budget, seeded

from penstock_router.text.tool_calls.json_scanner import JsonScanner, is_object

_LEAVES = [
    "",
    "a",
    'q"\\/\b\f\n\r\t',
    "é東🌧\u2028",
    0,
    -0.0,
    1,
    -12,
    1.5e300,
    -1e-7,
    True,
    False,
    None,
]


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random() if depth < 5 else 1.0
    if kind < 0.3:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    if kind < 0.6:
        return {f'k{at}\n"{"🌧" * at}': value(rng, depth + 1) for at in range(rng.randint(0, 4))}
    return rng.choice(_LEAVES)


def dumped(rng: random.Random) -> str:
    return json.dumps(
        value(rng),
        ensure_ascii=rng.random() < 0.5,
        indent=rng.choice([None, 0, 3]),
        separators=rng.choice([None, (",", ":"), (" ,\t", "\r\n: ")]),
    )


def scan(parts: list[str]) -> tuple[int, bool, bool]:
    """How many characters were taken, and how it ended."""
    scanner = JsonScanner()
    taken = 0
    for part in parts:
        stopped = scanner.feed(part)
        taken += stopped
        if stopped < len(part):
            break
    return taken, scanner.complete, scanner.failed


def is_json(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def test_a_value_ends_where_it_ends_and_what_follows_is_left() -> None:
    rng = seeded("values")
    for _ in range(budget(200, 20_000)):
        text = dumped(rng)
        for behind in (" ", ",", "}", "]", "x") if not text[-1].isdigit() else (" ", ",", "]"):
            assert scan([text + behind]) == (len(text), True, False), text
            assert scan(list(text + behind)) == (len(text), True, False), text


def test_what_it_takes_for_json_is_json_and_the_other_way_round() -> None:
    rng = seeded("mutations")
    for _ in range(budget(1_000, 100_000)):
        text = dumped(rng)
        at = rng.randint(0, len(text))
        scrap = rng.choice([*'"\\{}[],:0123456789.eE+-tfn \n\x00\x1f\x7f', "\\u12", "NaN", "null"])
        text = text[:at] + scrap + text[at + rng.randint(0, 2) :]
        stripped = text.strip(" \t\r\n")
        # What follows shows that a number is over.
        taken, complete, _ = scan([stripped + " "])
        assert (complete and taken == len(stripped)) == is_json(text), text
        assert scan(list(stripped + " ")) == scan([stripped + " "]), text


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("[1,]", 3),
        ('{"a":1,}', 7),
        ("{a", 1),
        ("01", 1),
        ("-x", 1),
        ("[1.]", 3),
        ("[1e+]", 4),
        ('"\\x', 2),
        ('"\\u12G', 5),
        ('"a\nb', 2),
        ("trve", 2),
        ("[1}", 2),
        ("'", 0),
        ("[1 2", 3),
        ('{"a" 1', 5),
    ],
)
def test_it_stops_at_the_first_character_that_no_json_has_there(text: str, taken: int) -> None:
    # A number alone is complete before what is no part of it.
    assert scan([text])[0] == taken
    assert scan(list(text))[0] == taken
    assert scan([text])[1:] == ((text == "01"), (text != "01"))


def test_a_scan_may_begin_inside_an_object() -> None:
    scanner = JsonScanner(inside_object=True)
    assert scanner.feed(' , "a": [1]} rest') == 12
    assert scanner.complete


def test_nesting_without_end_is_no_error() -> None:
    scanner = JsonScanner()
    text = '[{"a":' * 100_000
    assert scanner.feed(text) == len(text)
    assert not scanner.complete
    assert not scanner.failed


def test_an_object_alone_is_told_from_all_else() -> None:
    assert is_object(' {"a": 1}\n')
    for text in ("", "[]", "{", "{} {}", "null", '"{}"', "{'a': 1}"):
        assert not is_object(text)
