"""The answers of every family: read whole and in pieces, damaged, cut off, and while they come."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from types import FrameType
from typing import Any

import pytest
from support.budget import budget, seeded
from support.families import FAMILIES
from support.families.family import Call, Family
from support.random_calls import (
    as_meant,
    calls_of,
    can_reason,
    cut,
    format_of,
    is_besides,
    parts_of,
    random_call,
    random_calls,
    random_text,
    read,
    reader_of,
    reasoned,
    respelled,
    same,
    spelling_of,
    style_of,
    text_of,
    written_calls,
)

from penstock_router.text.answer_pieces import Piece, PieceKind, join_pieces
from penstock_router.text.formats.channels import ChannelFormat
from penstock_router.text.formats.registry import FORMATS

each_family = pytest.mark.parametrize("family", FAMILIES, ids=[one.format for one in FAMILIES])
SIZES = (1, 3, 9, 50)


def test_every_format_is_that_of_a_family() -> None:
    assert {each.name for each in FORMATS.values()} == {family.format for family in FAMILIES}


def spelled(rng: random.Random, family: Family) -> tuple[list[Call], str]:
    """Random calls and how they are written, with marks in strings or what looks like them."""
    spelling = spelling_of(family)
    calls = random_calls(rng, family, spelling.texts())
    spell = spelling.whole if family.has_quotes else spelling.alike
    return respelled(calls, spell), spell(family.write(calls))


def ways(rng: random.Random, text: str) -> list[list[str]]:
    """Ways to cut a text: all kinds of them, or one of them where there are many texts."""
    found = [*(parts_of(text, size) for size in SIZES), cut(rng, text)]
    return [rng.choice(found)] if budget(False, True) else found


# ---- Read whole and in pieces ------------------------------------------------------------------


@each_family
def test_calls_are_read_as_they_were_written_however_the_text_is_cut(family: Family) -> None:
    rng = seeded(family.format)
    for _ in range(budget(12, 3_000)):
        calls, text = spelled(rng, family)
        whole = read(family, [text])
        assert calls_of(whole) == same(calls), text
        assert text_of(whole, PieceKind.CONTENT).strip() == "", text
        for parts in ways(rng, text):
            assert read(family, parts) == whole, parts


@each_family
def test_reasoning_content_and_calls_are_told_apart(family: Family) -> None:
    rng = seeded(family.format)
    for _ in range(budget(12, 3_000)):
        calls, written = spelled(rng, family)
        thought, before, after = ("So " + random_text(rng).strip() + "." for _ in range(3))
        if not can_reason(family) or rng.random() < 0.3:
            thought = ""
        text = reasoned(family, thought) if thought else ""
        if family.says_before is None or rng.random() < 0.3:
            before = ""
        else:
            text += family.says_before(before)
        text += written
        if may_speak_after(family) and rng.random() < 0.7:
            text += f"\n{after}"
        else:
            after = ""
        whole = read(family, [text])
        assert calls_of(whole) == same(calls), text
        assert text_of(whole, PieceKind.REASONING) == thought, text
        assert text_of(whole, PieceKind.CONTENT) == before + after, text
        for parts in ways(rng, text):
            assert read(family, parts) == whole, parts


def may_speak_after(family: Family) -> bool:
    """Tell whether text may stand behind calls as it is."""
    return not isinstance(format_of(family), ChannelFormat)


@each_family
def test_an_answer_without_calls_is_content(family: Family) -> None:
    rng = seeded(family.format)
    for _ in range(budget(12, 500)):
        said = "So " + random_text(rng).strip() + "."
        text = family.says_alone(said)
        pieces = read(family, [text])
        assert pieces == [Piece(PieceKind.CONTENT, said)], text
        assert read(family, list(text)) == pieces


@each_family
def test_a_mark_that_prose_mentions_is_content(family: Family) -> None:
    for mark in format_of(family).marks:
        for said in (f"The mark {mark} is one.", f"`{mark}`, {mark[:-1]} and {mark[1:]}: marks"):
            if isinstance(format_of(family), ChannelFormat):
                # There some marks end a text wherever they stand.
                pieces = read(family, [family.says_alone(said)])
                assert read(family, list(family.says_alone(said))) == pieces
                assert said[-5:] in text_of(pieces, PieceKind.CONTENT)
                continue
            assert read(family, [said]) == [Piece(PieceKind.CONTENT, said)]
            assert read(family, list(said)) == [Piece(PieceKind.CONTENT, said)]


@each_family
def test_a_call_of_an_unknown_function_is_one_behind_a_mark_only(family: Family) -> None:
    written = family.write([("launch", {"city": "Paris"})])
    pieces = read(family, [written])
    if family.has_marks:
        assert calls_of(pieces) == same([("launch", {"city": "Paris"})])
        assert text_of(pieces, PieceKind.CONTENT) == ""
    else:
        assert pieces == [Piece(PieceKind.CONTENT, written)]
    assert read(family, list(written)) == pieces


# ---- Damaged -----------------------------------------------------------------------------------

_EXTRA = {"flag": True, "none": None, "text": "one\nTab\tend", "note": "last"}
_KINDS: dict[str, Callable[[str], str]] = {
    "raw newline": lambda text: text.replace("one\\nTab", "one\nTab"),
    "raw tab": lambda text: text.replace("Tab\\tend", "Tab\tend"),
    "trailing comma": lambda text: re.sub("(last[\"'])}", r"\1,}", text),
    "bracket too many": lambda text: re.sub("(last[\"'])}", r"\1}}", text),
    "words of Python, or of JSON": lambda text: _exchanged(
        text, ("true", "True"), ("null", "None")
    ),
    "other quotes": lambda text: _exchanged(text, ('"note": "last"', "'note': 'last'")),
}


def _exchanged(text: str, *pairs: tuple[str, str]) -> str:
    """Swap words in the last argument: the word of each pair that is there becomes the other."""
    at = text.rindex("flag")
    before, text = text[:at], text[at:]
    for one, other in pairs:
        first, second = (one, other) if one in text else (other, one)
        text = text.replace(first, second)
    return before + text


def damages(family: Family) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Yield each damage to what the family writes: its kind's name, and a function that does it."""
    for kind, damage in _KINDS.items():
        # If calls have only brackets around them, no bracket is known to be too many.
        if kind != "bracket too many" or family.format != "pythonic":
            yield kind, damage
    if family.begin:
        yield "begin twice", lambda text: text.replace(family.begin, family.begin * 2, 1)
    if family.end:
        yield "end missing", lambda text: text.removesuffix(family.end)
        yield "end twice", lambda text: text + family.end
    style = style_of(family)
    if style is not None and family.begin:
        begun = reasoned(family, "Let me see.").partition(style.end)[0].rstrip()
        yield "within reasoning", lambda text: f"{begun}\n\n{text}"


@each_family
def test_a_call_with_one_damage_is_read_as_it_was_meant(family: Family) -> None:
    rng = seeded(family.format)
    tried: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for kind, damage in damages(family):
        for _ in range(budget(20, 250)):
            name, arguments = random_call(rng, name=rng.choice(["write_file", "search"]))
            [call] = as_meant(family, [(name, {**arguments, "extra": _EXTRA})])
            written = family.write([call])
            text = damage(written)
            if text == written:
                continue
            whole = read(family, [text])
            tried[kind] += 1
            right[kind] += (
                calls_of(whole) == same([call]) and not text_of(whole, PieceKind.CONTENT).strip()
            )
            # Nothing that is streamed is contradicted by the whole.
            parts = rng.choice([cut(rng, text), parts_of(text, rng.choice(SIZES))])
            assert read(family, parts) == whole, text
    rates = {kind: f"{right[kind]} of {count}" for kind, count in tried.items()}
    print(family.format, rates)
    assert len(tried) >= 3
    assert all(right[kind] >= 0.95 * count for kind, count in tried.items()), rates


@each_family
def test_no_character_outside_of_marks_is_lost(family: Family) -> None:
    rng = seeded(family.format)
    marks = sorted({*format_of(family).marks, *filter(None, (family.begin, family.end))})
    for _ in range(budget(100, 2_000)):
        call = random_call(rng)
        text = family.write([call])
        at = rng.randint(0, len(text))
        if is_besides(family, text, at) or is_within(text, at, marks):
            continue
        if is_within_word(text, at, same([call])[0]):
            continue
        marked = f"{text[:at]}☺{text[at:]}"
        pieces = read(family, [marked])
        assert any("☺" in piece.text or "263a" in piece.text for piece in pieces), marked
        assert read(family, cut(rng, marked)) == pieces, marked


def is_within(text: str, at: int, marks: list[str]) -> bool:
    """Tell whether a place is inside of a mark."""
    return any(
        text.startswith(mark, start)
        for mark in marks
        for start in range(max(0, at - len(mark) + 1), at)
    )


# Tags that consist of several marks, with names and attributes between them.
_TAGS = re.compile(r"<\|open\|>[^<]*<\|sep\|>|<\|close\|>\w*<\|sep\|>|\]<\]minimax\[>\[<[^<>]*>")


def is_within_word(text: str, at: int, call: str) -> bool:
    """True if a place is inside a word of the family's syntax that the call does not have, or
    inside a tag.
    """
    found = [word for word in re.finditer(r"\w+", text) if word.start() <= at <= word.end()]
    words = re.findall(r"\d+", call)
    for word in (each.group() for each in found):
        if word not in (words if word.isdigit() else call):
            return True
    return any(tag.start() < at < tag.end() for tag in _TAGS.finditer(text))


# ---- Cut off -----------------------------------------------------------------------------------

# The last word, number or escape of arguments that were cut off: how it goes on is not known.
_LAST_WORD = re.compile(r"\\?[\w.+\-]*$")


@each_family
def test_a_call_that_was_cut_off_stays_as_far_as_it_came(family: Family) -> None:
    rng = seeded(family.format)
    for _ in range(budget(1, 25)):
        _, text = spelled(rng, family)
        whole = written_calls(read(family, [text]))
        for at in range(len(text)):
            reader = reader_of(family)
            early = join_pieces(reader.feed(text[:at]))
            pieces = join_pieces([*early, *reader.flush(was_cut=True)])
            for number, (name, arguments) in enumerate(written_calls(pieces)):
                assert name == whole[number][0]
                came = written_calls(early)[number:]
                if came and came[0][1] == whole[number][1]:
                    # It came whole.
                    assert arguments == whole[number][1]
                    continue
                assert arguments != whole[number][1] or arguments == "{}", text[:at]
                sure = _LAST_WORD.sub("", arguments)
                assert whole[number][1].startswith(sure), (text[:at], arguments)


@each_family
def test_a_call_whose_values_are_closed_is_closed_where_the_model_ends(family: Family) -> None:
    rng = seeded(family.format)
    for _ in range(budget(1, 25)):
        [(name, given)] = as_meant(family, [random_call(rng, name="write_file")])
        text = family.write([(name, given)])
        for at in range(len(text)):
            pieces = read(family, [text[:at]])
            for read_name, arguments in written_calls(pieces):
                assert read_name == name
                try:
                    found = json.loads(arguments)
                except ValueError:
                    continue
                # The token that ends an answer in channels is the end mark of its last call.
                is_ended = isinstance(format_of(family), ChannelFormat)
                equal = [given[key] == value for key, value in found.items()]
                assert all(equal[:-1] if is_ended else equal), text[:at]
        if family.end:
            pieces = read(family, [text.removesuffix(family.end)])
            assert calls_of(pieces) == same([(name, given)])


# ---- While they come ---------------------------------------------------------------------------


@each_family
@pytest.mark.parametrize("is_nested", [False, True])
def test_arguments_are_shown_while_they_come(family: Family, is_nested: bool) -> None:
    assert delay(family, budget(2_000, 16_000), is_nested=is_nested) <= 64


def delay(family: Family, size: int, *, is_nested: bool) -> int:
    """Count how many characters of a long string what is shown is behind what came, at most."""
    for line in ('if x < 3:\n    say("é\\\\ü", [1, {}])\n', "some words and then some more, "):
        value = (line * size)[:size]
        given: dict[str, Any] = {"extra": {"text": value}} if is_nested else {"content": value}
        text = family.write([("write_file", {"path": "a", **given})])
        ways: list[Callable[[str], str]] = [json_escaped, repr_escaped, str]
        found = [way for way in ways if way(value) in text]
        if found:
            break
    else:
        raise AssertionError(f"how {family.format} writes a long string is not known")
    written, shown = ends_of(found[0], value), ends_of(json_escaped, value)
    start, begin = text.index(found[0](value)), json_escaped(value[:20])
    reader, arguments, most = reader_of(family), "", 0
    for at in range(0, len(text), 4):
        pieces = reader.feed(text[at : at + 4])
        arguments += text_of(pieces, PieceKind.ARGUMENTS)
        came = count_of(written, at + 4 - start)
        at_shown = arguments.find(begin)
        gone = count_of(shown, len(arguments) - at_shown) if at_shown >= 0 else 0
        most = max(most, came - min(gone, size))
    assert json.loads(arguments)["path"] == "a"
    return most


def json_escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def repr_escaped(text: str) -> str:
    return repr(text)[1:-1]


def ends_of(way: Callable[[str], str], value: str) -> list[int]:
    """Return the offsets at which the characters of `value` end if it is written in this way."""
    return list(accumulate(len(way(character)) for character in value))


def count_of(ends: list[int], length: int) -> int:
    """Count how many characters there are in so much of what is written."""
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if ends[middle] <= length else (low, middle)
    return low


def work(family: Family, text: str) -> int:
    """Count how many functions are called while a text comes, four characters at a time."""
    reader = reader_of(family)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for at in range(0, len(text), 4):
            reader.feed(text[at : at + 4])
        reader.flush()
    finally:
        sys.setprofile(None)
    return calls


def long_texts(family: Family, size: int) -> Iterator[str]:
    """Long answers, of this size and more."""
    rng = random.Random(1)
    one = family.write([random_call(rng, name="search")])
    call = family.write([("write_file", {"path": "a", "content": "§"})])
    begun = call[: call.index("§")]
    nested = family.write([("write_file", {"path": "a", "extra": {"a": [1, "§"]}})])
    marks = format_of(family).marks or ("{", "```", "[")
    halves = [mark[:-1] for mark in marks]
    repeated = [one + "\n", call, family.begin or marks[0], *marks]
    repeated += [*halves, "".join(marks), "<think>", "</think>", " ", "\n"]
    for more in filter(None, repeated):
        yield more * (size // len(more) + 1)
    for more in filter(None, ("x", "\\", "\n", " <", '"a', "]}", *marks, *halves)):
        yield begun + more * (size // len(more) + 1)
    yield nested[: nested.index("1")] + "[" * size
    yield nested[: nested.index("§")] + "{a:1," * (size // 5)
    yield "<think>" + one * (size // len(one) + 1)
    yield "<think>\n" + begun + "x " * (size // 2)


@each_family
def test_work_grows_as_text_does(family: Family) -> None:
    size = budget(300, 4_000)
    for text in long_texts(family, 2 * size):
        some, much = work(family, text[:size]), work(family, text[: 2 * size])
        assert much < 2.5 * some + 1_000, (text[:80], some, much)
