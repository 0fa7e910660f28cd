"""Families whose whole answer is channels: what their models write, right and nearly right."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from support.families import FAMILIES
from support.families.channel_templates import TEMPLATES
from support.families.family import Family
from unit.router.formats.channel_cases import CASES, TOOLS, Case
from unit.router.formats.test_forms import accepts, compiled

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece, PieceKind, join_pieces
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.channels import ChannelParser
from penstock_router.text.formats.registry import CHANNELS
from penstock_router.text.marks import NO_MARKS, TOKEN, Marks
from penstock_router.text.model_conventions import conventions_of
from penstock_router.text.structural_tag_builder import literal

BY_NAME: dict[str, Family] = {family.format: family for family in FAMILIES}
NAMES = sorted({each.name for each in CHANNELS.values()})
each_case = pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.format}-{at}" for at, case in enumerate(CASES)]
)


@dataclass(frozen=True)
class Read:
    """The reasoning, the content and the calls that were read from an answer."""

    reasoning: str
    content: str
    # Each call's name and its arguments, parsed where they are whole.
    calls: list[tuple[str, Any]]


def reader_of(case: Case, marks: Marks = NO_MARKS) -> ChannelParser:
    tools = TOOLS if case.tools is None else case.tools
    return CHANNELS[case.format].channels(tools, marks, begun=case.begun)


def pieces_of(case: Case, parts: Sequence[str], marks: Marks = NO_MARKS) -> list[Piece]:
    reader = reader_of(case, marks)
    pieces = [piece for part in parts for piece in reader.feed(part)]
    return join_pieces([*pieces, *reader.flush(was_cut=case.was_cut)])


def read_of(pieces: list[Piece]) -> Read:
    texts = {PieceKind.REASONING: "", PieceKind.CONTENT: ""}
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind is PieceKind.CALL:
            calls.append((piece.text, ""))
        elif piece.kind is PieceKind.ARGUMENTS:
            name, before = calls[piece.call]
            calls[piece.call] = name, before + piece.text
        else:
            texts[piece.kind] += piece.text
    return Read(
        texts[PieceKind.REASONING],
        texts[PieceKind.CONTENT],
        [(name, parsed(text)) for name, text in calls],
    )


def meant(case: Case) -> Read:
    return Read(case.reasoning, case.content, list(case.calls))


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def tokens_of(case: Case) -> tuple[list[str], Marks]:
    """The answer where every mark is a token: the text of each token."""
    texts = [mark for mark in CHANNELS[case.format].marks if re.fullmatch(r"<\|.*\|>", mark)]
    marks = Marks(dict(enumerate(texts)))
    cut = re.split(f"({'|'.join(map(re.escape, texts))})", case.text)
    parts = [[TOKEN + part] if part in texts else list(part) for part in cut]
    return [one for part in parts for one in part], marks


@each_case
def test_what_a_model_wrote_is_read_as_it_was_meant(case: Case) -> None:
    assert read_of(pieces_of(case, [case.text])) == Read(
        case.reasoning, case.content, list(case.calls)
    )


@each_case
def test_where_a_text_is_cut_does_not_matter(case: Case) -> None:
    whole = pieces_of(case, [case.text])
    assert pieces_of(case, list(case.text)) == whole
    for cut in range(len(case.text)):
        assert pieces_of(case, [case.text[:cut], case.text[cut:]]) == whole


@each_case
def test_marks_that_are_tokens_are_read_too_and_never_shown(case: Case) -> None:
    tokens, marks = tokens_of(case)
    pieces = pieces_of(case, tokens, marks)
    assert pieces == pieces_of(case, ["".join(tokens)], marks)
    if not case.has_mentions:
        assert read_of(pieces) == meant(case)
    shown = "".join(piece.text for piece in pieces)
    assert TOKEN not in shown
    assert not any(mark in shown for mark in marks.tokens.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_same_characters_as_a_mark_that_is_a_token_are_text(name: str) -> None:
    family = BY_NAME[name]
    assert family.reasons is not None
    _, marks = tokens_of(Case(name, ""))
    for text in (family.says_alone("hello"), family.reasons("hm") + family.says_alone("hello")):
        reader = CHANNELS[name].channels(TOOLS, marks)
        pieces = join_pieces([*reader.feed(text), *reader.flush()])
        assert pieces == [Piece(PieceKind.CONTENT, text)]


@pytest.mark.parametrize("name", NAMES)
def test_each_channel_is_shown_while_it_comes(name: str) -> None:
    family = BY_NAME[name]
    assert family.reasons is not None
    said = "word " * 20 + "end"
    text = family.reasons(said) + family.says_alone(said)
    reader = CHANNELS[name].channels(TOOLS)
    shown: dict[PieceKind, str] = {PieceKind.REASONING: "", PieceKind.CONTENT: ""}
    late = 0
    for at, character in enumerate(text):
        for piece in reader.feed(character):
            shown[piece.kind] += piece.text
        rest = text[: at + 1].rpartition("word ")[2]
        if rest in "word end" and len(rest) > 2:
            late = max(late, 0 if rest in "".join(shown.values())[-5:] else 1)
    reader.flush()
    assert shown == {PieceKind.REASONING: said, PieceKind.CONTENT: said}
    assert late == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_template_of_the_family_shows_its_format(name: str) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, {})
    conventions = conventions_of(template, "auto", "auto")
    assert conventions.names == (name, name)
    # Also where it takes no tools, and by a name for reasoning.
    without = ChatTemplate({"default": TEMPLATES[name].replace("tools", "xs")}, {})
    assert conventions_of(without, "auto", "auto").names == (name, name)
    assert conventions_of(None, "auto", name).names == (name, name)


STRICT = (
    Tool(
        "add-up",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        strict=True,
    ),
)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_forced_calls_may_come_behind_reasoning_and_nothing_else_may(
    name: str, begun: bool
) -> None:
    family, format_ = BY_NAME[name], CHANNELS[name]
    assert family.reasons is not None
    assert format_.style is not None
    calls = format_.calls(STRICT, CallRule(required=True, parallel=True))
    form = compiled(format_.reasoned(calls, begun=begun))
    reasoning = family.reasons("hm").removeprefix(format_.style.begin if begun else "")
    right, wrong = family.write([("add-up", {"a": 1})]), family.write([("add-up", {"a": "x"})])
    assert accepts(form, reasoning + right)
    assert accepts(form, right) is not begun
    assert not accepts(form, reasoning + wrong)
    assert not accepts(form, reasoning + family.says_alone("x"))


@pytest.mark.parametrize("name", NAMES)
def test_strict_calls_may_come_behind_reasoning_and_text(name: str) -> None:
    family, format_ = BY_NAME[name], CHANNELS[name]
    assert family.reasons is not None
    assert format_.style is not None
    calls = format_.calls(STRICT, CallRule(required=False, parallel=True))
    form = compiled(format_.reasoned(calls, begun=False))
    reasoning = family.reasons("hm")
    for before in ("", reasoning, *([family.says_before("x")] if family.says_before else [])):
        assert accepts(form, before + family.write([("add-up", {"a": 1})])), before
        assert not accepts(form, before + family.write([("add-up", {"a": "x"})])), before
    for text in ("", "plain", family.says_alone("x < y"), reasoning + family.says_alone("x")):
        assert accepts(form, text), text


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_answers_own_format_is_that_of_its_channel_of_text(name: str, begun: bool) -> None:
    family, format_ = BY_NAME[name], CHANNELS[name]
    assert family.reasons is not None
    assert format_.style is not None
    form = compiled(format_.reasoned(format_.said(literal("yes")), begun=begun))
    reasoning = family.reasons("hm").removeprefix(format_.style.begin if begun else "")
    assert accepts(form, reasoning + family.says_alone("yes"))
    assert accepts(form, family.says_alone("yes")) is not begun
    assert not accepts(form, reasoning + family.says_alone("no"))
    assert not accepts(form, reasoning + "yes")
