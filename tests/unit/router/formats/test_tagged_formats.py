"""Formats whose arguments stand between tags: random calls, however cut, and what goes wrong."""

from __future__ import annotations

import itertools
import random
import sys
from types import FrameType
from typing import Any

import pytest
from support.budget import budget, seeded
from support.families.family import Family
from support.families.tagged_families import FAMILIES
from support.families.tagged_reading import (
    TOOLS,
    calls_of,
    content,
    marks_of,
    meant,
    random_call,
    read,
    written_in_tokens,
)

from penstock_router.text.answer_pieces import Piece
from penstock_router.text.formats.base import CallFormat
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.marks import NO_MARKS, Marks

each_family = pytest.mark.parametrize("family", FAMILIES, ids=[each.format for each in FAMILIES])


def read_anyhow(
    rng: random.Random, form: CallFormat, text: str, marks: Marks = NO_MARKS
) -> list[Piece]:
    """The pieces, which are the same however the text is cut."""
    whole = read(form, text, marks=marks)
    assert read(form, text, size=1, marks=marks) == whole, text
    assert read(form, text, size=rng.randint(2, 30), marks=marks) == whole, text
    return whole


@each_family
def test_calls_are_read_as_they_were_meant_however_they_are_cut(family: Family) -> None:
    rng, form = seeded(family.format), FORMATS[family.format]
    tags = [mark for mark in form.marks if mark not in family.begin and mark.count("<") == 1]
    for _ in range(budget(25, 600)):
        calls = [meant(family, random_call(rng, tags)) for _ in range(rng.randint(1, 3))]
        before, behind = rng.choice(["", "Let me see: a < b."]), rng.choice(["", "\nDone <now>."])
        text = before + ("\n\n" if before else "") + family.write(calls) + behind
        pieces = read_anyhow(rng, form, text)
        assert calls_of(pieces) == calls, text
        assert content(pieces) == before + behind.strip(), text


@each_family
def test_where_marks_are_tokens_strings_may_hold_any_of_them_as_text(family: Family) -> None:
    rng, form = seeded(family.format), FORMATS[family.format]
    marks = marks_of(form)
    for _ in range(budget(25, 600)):
        tags = tuple(marks.tokens.values())
        calls = [
            meant(family, random_call(rng, tags, is_safe=False)) for _ in range(rng.randint(1, 3))
        ]
        text = written_in_tokens(family, form, calls)
        assert calls_of(read_anyhow(rng, form, text, marks)) == calls, text


@each_family
def test_a_call_that_was_cut_stays_as_far_as_it_came(family: Family) -> None:
    rng, form = seeded(family.format), FORMATS[family.format]
    for _ in range(budget(1, 8)):
        calls = [meant(family, random_call(rng)) for _ in range(2)]
        text = family.write(calls)
        for end in rng.sample(range(len(text)), min(len(text), budget(60, 300))):
            cut = text[:end]
            pieces = read(form, cut, was_cut=True)
            assert read(form, cut, size=1, was_cut=True) == pieces, cut
            given = calls_of(pieces)
            whole = [each for each in given if not isinstance(each[1], str)]
            # One whose end mark alone is missing may be whole.
            assert whole == calls[: len(whole)], cut
            assert len(given) - len(whole) <= 1, cut


@each_family
def test_a_mention_of_marks_in_prose_is_content(family: Family) -> None:
    rng, form = seeded(family.format), FORMATS[family.format]
    for mark in form.marks:
        for text in (
            f"The tag {mark} is of the format, see `{mark}`.",
            f"{mark}",
            f"{mark}{mark} or",
            f"{mark}\n\n{mark}",
        ):
            pieces = read_anyhow(rng, form, text)
            assert calls_of(pieces) == []
            assert content(pieces) == text


@each_family
def test_the_end_of_the_last_call_may_be_missing_or_stand_there_twice(family: Family) -> None:
    rng, form = seeded(family.format), FORMATS[family.format]
    for _ in range(budget(10, 500)):
        calls = [meant(family, random_call(rng)) for _ in range(rng.randint(1, 2))]
        text = family.write(calls)
        assert text.endswith(family.end)
        assert calls_of(read_anyhow(rng, form, text.removesuffix(family.end))) == calls, text
        pieces = read_anyhow(rng, form, text + family.end)
        assert calls_of(pieces) == calls, text
        assert content(pieces) == "", text


def mutated(rng: random.Random, text: str, scraps: tuple[str, ...]) -> str:
    """An answer after a few accidents."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.choice([1, 3, 30]))
        to = rng.randint(0, len(text))
        text = rng.choice(
            [
                text[:start] + text[end:],
                text[:end] + text[start:],
                text[:to] + rng.choice(scraps) + text[to:],
                text[:to] + text[start:end] + text[to:],
                text[:to] or text,
            ]
        )
    return text


@each_family
def test_a_mutated_answer_raises_nothing_and_no_cut_changes_it(family: Family) -> None:
    rng, form = seeded(family.format), FORMATS[family.format]
    scraps = (*form.marks, "\n", " " * 70, "<", ">", '"', "{", "}", "x", "</", ' name="')
    for _ in range(budget(30, 1_000)):
        calls = [random_call(rng, form.marks) for _ in range(2)]
        text = mutated(rng, "Well.\n" + family.write(calls), scraps)
        for was_cut in (False, True):
            whole = read(form, text, was_cut=was_cut)
            assert read(form, text, size=1, was_cut=was_cut) == whole, text
            assert read(form, text, size=rng.randint(2, 9), was_cut=was_cut) == whole, text
        if not calls_of(whole):
            assert content(whole) == text


def work(form: CallFormat, text: str, size: int) -> int:
    """Count how many functions are called while a text comes in parts."""
    parser: Any = form.parser(TOOLS)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for at in range(0, len(text), size):
            parser.feed(text[at : at + size])
            assert len(parser._text) - parser._at < 200 + size
        parser.flush()
    finally:
        sys.setprofile(None)
    return calls


@each_family
def test_work_grows_as_text_does(family: Family) -> None:
    rng, form, size = seeded(family.format), FORMATS[family.format], budget(60, 1_500)
    begun = family.write([("write_file", {"text": "§"})]).partition("§")[0]
    listed = family.write([("write_file", {"items": ["§"]})]).partition("§")[0]
    halves = [mark[: len(mark) // 2] for mark in form.marks]
    begins = ("", begun, listed, family.begin)
    pairs = list(itertools.product(begins, (*form.marks, *halves, "\n", " ", "<", "x", "{", '"')))
    for begin, more in rng.sample(pairs, min(len(pairs), budget(5, 30))):
        some, much = ((begin + more * count) for count in (size, 4 * size))
        part = 4 if size > 1_000 else 2
        assert work(form, much, part) < 4.6 * work(form, some, part) + 2_000, (begin, more)
        assert work(form, much, len(much)) < 4.6 * work(form, some, len(some)) + 2_000, (
            begin,
            more,
        )


@each_family
def test_arguments_are_shown_while_they_come(family: Family) -> None:
    form = FORMATS[family.format]
    value = "".join(f"line {number}: x < {number}\n" for number in range(400))
    text = family.write([("write_file", {"text": value})])
    at = text.index("line 200")
    shown = "".join(piece.text for piece in read_until(form, text[:at]))
    assert "line 198" in shown


def read_until(form: CallFormat, text: str) -> list[Piece]:
    """The pieces that can be shown while more may come."""
    return form.parser(TOOLS).feed(text)
