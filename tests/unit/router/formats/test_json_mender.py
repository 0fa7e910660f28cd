"""A JSON value that comes in pieces: written as it stands if it is JSON, mended if nearly so."""

from __future__ import annotations

import json
import random
import sys
from types import FrameType
from typing import Any

import pytest
from support.budget import budget, seeded

from penstock_router.text.formats.reading.json_mender import JsonMender, mended_object

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


def is_text(value: Any) -> bool:
    """Tell whether no string has half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def mended(parts: list[str], mender: JsonMender | None = None) -> tuple[int, str, str, bool, bool]:
    """Return how many characters were taken, what was written of them, what was not written yet,
    whether the value is complete, and whether it failed.
    """
    mender = mender or JsonMender()
    taken, said = 0, ""
    for part in parts:
        stopped = mender.feed(part)
        taken += stopped
        said += mender.take()
        if stopped < len(part):
            break
    return taken, said, mender.unsaid, mender.complete, mender.failed


def cut(rng: random.Random, text: str) -> list[str]:
    ends = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def is_json(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def test_what_is_json_is_written_as_it_stands_and_what_follows_is_left() -> None:
    rng = seeded("values")
    for _ in range(budget(200, 20_000)):
        text = dumped(rng)
        for behind in (" ", ",", "}", "]", "x") if not text[-1].isalnum() else (" ", ",", "]"):
            wanted = (len(text), text, "", True, False)
            assert mended([text + behind]) == wanted, text
            assert mended(list(text + behind)) == wanted, text
            assert mended(cut(rng, text + behind)) == wanted, text


def test_whatever_comes_is_written_as_json_or_fails_and_no_cut_changes_it() -> None:
    rng = seeded("mutations")
    for _ in range(budget(1_000, 100_000)):
        text = dumped(rng)
        for _ in range(rng.randint(1, 3)):
            at = rng.randint(0, len(text))
            scraps = [*"\"'\\{}[],:0123456789.eE+-tfn \n\x00\x1f\x7fu", "\\u12", "NaN", "null"]
            scrap = rng.choice([*scraps, "None", "True", "abc", ",,", "\\'", "\\x", "\ud800"])
            text = text[:at] + scrap + text[at + rng.randint(0, 2) :]
        stripped = text.strip(" \t\r\n")
        # What follows shows that a number is over.
        whole = taken, said, _, complete, failed = mended([stripped + " "])
        assert mended(list(stripped + " ")) == whole, text
        assert mended(cut(rng, stripped + " ")) == whole, text
        assert not (complete and failed)
        if is_json(stripped) and is_text(json.loads(stripped)):
            assert (taken, said, complete) == (len(stripped), stripped, True)
        if complete:
            assert is_json(said), text
            assert is_text(json.loads(said.replace("\ud800", ""))), text


def test_whatever_was_read_can_be_closed_and_is_json_then() -> None:
    rng = seeded("closed")
    for _ in range(budget(500, 50_000)):
        text = dumped(rng)
        text = text[: rng.randint(0, len(text))]
        mender = JsonMender()
        mender.feed(text)
        was_complete = mender.complete
        if not text.strip() or was_complete:
            continue
        mender.close()
        assert mender.complete
        said = mender.take()
        assert is_json(said), (text, said)
        assert mender.unsaid == ""


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('"a\nb\tc\x00"', '"a\\nb\\tc\\u0000"'),
        ("'a \"b\" c'", '"a \\"b\\" c"'),
        (r"'it\'s'", '"it\'s"'),
        (r'"C:\dir \* \é"', r'"C:\\dir \\* \\é"'),
        (r'"\u12G4 \u"', r'"\\u12G4 \\u"'),
        (r'"\ud83d\ude00 \uD83D \ude00"', r'"\ud83d\ude00 \ufffd \ufffd"'),
        (r'"\ud83d\ud83d\ude00\ud83d\n\ud83d"', r'"\ufffd\ud83d\ude00\ufffd\n\ufffd"'),
        (r'"\ud83d\u00e9\ud83d\u12G\ud83d\x"', r'"\ufffd\u00e9\ufffd\\u12G\ufffd\\x"'),
        ("[1, 2, ]", "[1, 2 ]"),
        ("[1,, 2]", "[1, 2]"),
        ('{"a": 1,}', '{"a": 1}'),
        ('{"a": 1,,"b": 2 ,\n}', '{"a": 1,"b": 2 \n}'),
        ('{"a": None, "b": [True, False]}', '{"a": null, "b": [true, false]}'),
        ("{a: 1, b-c :2, $d: 3}", '{"a": 1, "b-c" :2, "$d": 3}'),
        ("{'a': 'b'}", '{"a": "b"}'),
        ("[0x1F, 1_000, .5, 1., +7, 007, 1e5]", "[31, 1000, 0.5, 1.0, 7, 7, 1e5]"),
    ],
)
def test_what_models_get_wrong_is_mended_however_it_is_cut(text: str, meant: str) -> None:
    assert is_json(meant)
    wanted = (len(text), meant, "", True, False)
    assert mended([text]) == wanted
    assert mended(list(text)) == wanted
    for at in range(len(text) + 1):
        assert mended([text[:at], text[at:]]) == wanted, at


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("{1: 2}", 1),
        ("{,}", 1),
        ("[,1]", 1),
        ("-x]", 2),
        ("[1e+]", 4),
        ("[NaN]", 4),
        ("[Paris]", 6),
        ("[1}", 2),
        ("[1 2", 3),
        ('{"a" 1', 5),
        ('{"a" "b"}', 5),
        ('{a"b": 1}', 2),
        ('{"a": }', 6),
        (")", 0),
        ("[" + "1" * 500, 401),
    ],
)
def test_what_is_beyond_mending_fails_at_the_same_place_however_it_is_cut(
    text: str, taken: int
) -> None:
    for parts in ([text], list(text), [text[:2], text[2:]]):
        found = mended(parts)
        assert (found[0] if len(text) < 100 else min(found[0], 401)) == taken
        assert found[3:] == (False, True)


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ('{"a": "b', '{"a": "b"}'),
        ('{"a', '{"a": null}'),
        ('{"a"', '{"a": null}'),
        ('{"a": ', '{"a": null}'),
        ("{a", '{"a": null}'),
        ('{"a": [1, {"b": 2', '{"a": [1, {"b": 2}]}'),
        ('{"a": Tru', '{"a": "Tru"}'),
        ('{"a": True', '{"a": true}'),
        ("[1, ", "[1]"),
        ('{"a": 1, ', '{"a": 1}'),
        ("{", "{}"),
        (r'["\ud83d', r'["\ufffd"]'),
        (r'["\ud83d\u12', r'["\ufffd\\u12"]'),
        ('["\\ud83d\\', r'["\ufffd\\"]'),
    ],
)
def test_a_value_that_its_writer_says_is_over_gets_its_end(text: str, closed: str) -> None:
    mender = JsonMender()
    assert mender.feed(text) == len(text)
    assert not mender.complete
    mender.close()
    assert mender.complete
    said = mender.take()
    assert is_json(said)
    assert said == closed


def test_a_value_may_begin_inside_an_object() -> None:
    text = ' , "a": [1]} rest'
    assert mended([text], JsonMender(inside_object=True))[0] == 12
    assert mended(list(text), JsonMender(inside_object=True))[3:] == (True, False)


def test_what_is_held_back_is_a_word_an_escape_or_a_comma() -> None:
    for text, unsaid in [
        ('{"a": "b', ""),
        ('{"a": "b\\', "\\"),
        ('{"a": "b\\u00', "\\u00"),
        ('{"a": 12', "12"),
        ('{"a": 12, ', ", "),
        ('{"a": Tru', "Tru"),
        ("{ab", "ab"),
    ]:
        _, said, held, _, _ = mended([text])
        assert held == unsaid
        assert len(said) == len(text) - len(unsaid)


def test_nesting_without_end_is_no_error() -> None:
    mender = JsonMender()
    text = '[{"a":' * 100_000
    assert mender.feed(text) == len(text)
    assert not mender.complete
    assert not mender.failed


def test_work_grows_as_text_does() -> None:
    def work(text: str) -> int:
        mender: Any = JsonMender()
        calls = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for at in range(0, len(text), 4):
                mender.feed(text[at : at + 4])
                mender.take()
        finally:
            sys.setprofile(None)
        # What would be copied again and again.
        assert len(mender.unsaid) <= 800
        return calls

    size = budget(2_000, 100_000)
    for begin, more in [
        ("", "[{"),
        ('"', "x\n\\"),
        ("[", "1,"),
        ("[1", ",\n"),
        ("[1,", " "),
        ("[", "True, "),
        ("{a", "b"),
        ("{", "a:1,"),
    ]:
        some, much = (begin + (more * size)[: size * by] for by in (1, 2))
        assert work(much) < 2.5 * work(some) + 500, (begin, more)


def test_an_object_alone_is_told_from_all_else() -> None:
    assert mended_object(' {"a": 1}\n') == '{"a": 1}'
    assert mended_object("{'a': True,}") == '{"a": true}'
    for text in ("", "[]", "{", "{} {}", "null", '"{}"', "{'a'}"):
        assert mended_object(text) is None
