"""Answers in tokens, where each mark of a family is one special token: only that token is the mark.

The same characters by other tokens are text, wherever they stand.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from support.budget import budget, seeded
from support.families import FAMILIES
from support.families.family import Family
from support.random_calls import (
    TOOLS,
    Spelling,
    calls_of,
    can_reason,
    format_of,
    is_besides,
    random_calls,
    random_text,
    reasoned,
    respelled,
    same,
    spelling_of,
    style_of,
    text_of,
    token_marks,
)
from support.router_doubles import INFO, byte_level_tokenizer, model_files
from tokenizers import AddedToken, Tokenizer
from unit.router.test_parsed_answers import EOS, choice_of, deltas_of, whole

from penstock_proto.types import FinishReason
from penstock_router.generation.choice import Delta
from penstock_router.request import ToolChoice
from penstock_router.served_models import ServedModel
from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.formats.channels import ChannelFormat
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.prompts import TextModel
from penstock_router.text.reasoning import STYLES
from penstock_router.text.tokenizer import load_tokenizer

each_family = pytest.mark.parametrize("family", FAMILIES, ids=[one.format for one in FAMILIES])
BUNDLES = (1, 3, 9, 50)
# A member of an object before one that a call has.
_NESTED_TAG = re.compile(r"\]<\]minimax\[>\[</?[^<>]*")
# A tag of MiniCPM5's that the end of the answer leaves open.
_OPEN_TAG = re.compile(r"<param [^<>]*\Z")
_STRANGER = re.compile(
    r'''"[^"]*"\s*:\s*("[^"]*"|[\w.\- ]*)\s*,\s*"(tool_)?(name|arguments|parameters)"'''
)


class Tokens:
    """A family's tokenizer, in which its marks are special tokens, and its model."""

    def __init__(self, family: Family) -> None:
        tool_format, style = format_of(family), style_of(family)
        self.marks = token_marks(family)
        # Without the marks, and with them.
        self.plain = byte_level_tokenizer()
        self.marked = Tokenizer.from_str(self.plain.to_str())
        self.marked.add_special_tokens([AddedToken(mark, special=True) for mark in self.marks])
        self.model = ServedModel(
            INFO,
            TextModel(
                INFO.model,
                INFO.max_model_len,
                INFO.vocab_size,
                load_tokenizer(model_files(self.marked)),
                None,
                False,
                Conventions(tool_format, style),
            ),
        )

    def of(self, text: str, spelling: Spelling) -> list[int]:
        """The tokens of an answer; a letter that stands for a mark is spelled by other tokens."""
        ids: list[int] = []
        rest = ""
        for character in text:
            if character in spelling.letters:
                ids += self.marked.encode(rest, add_special_tokens=False).ids
                ids += self.spelled(spelling.letters[character])
                rest = ""
            else:
                rest += character
        return [*ids, *self.marked.encode(rest, add_special_tokens=False).ids]

    def spelled(self, text: str) -> list[int]:
        """The tokens of a text, none of which is a mark."""
        return self.plain.encode(text, add_special_tokens=False).ids

    def end(self, ids: list[int], count: int) -> int:
        """Count how many characters the first tokens have."""
        return len(self.marked.decode(ids[:count], skip_special_tokens=False))


@functools.cache
def tokens_of(family: Family) -> Tokens:
    return Tokens(family)


def read(tokens: Tokens, ids: Sequence[int], bundle: int) -> list[Piece]:
    """The pieces of an answer that comes in such bundles, through the whole of a choice."""
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": ToolChoice("auto")}
    choice = choice_of(tokens.model, **options)
    deltas: list[Delta] = deltas_of(choice, [*ids, EOS], bundle, FinishReason.STOP)
    pieces = whole(deltas).pieces
    assert pieces is not None
    return pieces


def read_alike(tokens: Tokens, ids: Sequence[int], bundles: Iterable[int] = BUNDLES) -> list[Piece]:
    """The pieces, which are the same however tokens are bundled."""
    first, *others = [read(tokens, ids, bundle) for bundle in bundles]
    assert all(each == first for each in others), ids
    assert "\ud800" not in json.dumps([piece.text for piece in first], ensure_ascii=False)
    return first


@each_family
def test_marks_in_strings_and_in_text_are_text_if_other_tokens_spell_them(family: Family) -> None:
    rng = seeded(family.format)
    tokens, spelling = tokens_of(family), spelling_of(family)
    letters = spelling.texts()
    for _ in range(budget(5, 60)):
        calls = random_calls(rng, family, letters)
        thought, before = (f"So {random_text(rng, letters).strip()}." for _ in range(2))
        text = reasoned(family, thought) if can_reason(family) else (thought := "")
        if family.says_before is None:
            before = ""
        else:
            text += family.says_before(before)
        pieces = read_alike(tokens, tokens.of(text + family.write(calls), spelling))
        assert calls_of(pieces) == same(respelled(calls, spelling.whole)), text
        assert text_of(pieces, PieceKind.REASONING) == spelling.whole(thought)
        assert text_of(pieces, PieceKind.CONTENT) == spelling.whole(before)


@each_family
def test_calls_whose_marks_are_spelled_by_other_tokens_are_content(family: Family) -> None:
    if not family.has_marks or isinstance(format_of(family), ChannelFormat):
        return
    rng = seeded(family.format)
    tokens = tokens_of(family)
    if not {*format_of(family).begins(), *format_of(family).marks} <= tokens.marks:
        return
    for _ in range(budget(5, 60)):
        text = f"So {family.write(random_calls(rng, family))}"
        assert read_alike(tokens, tokens.spelled(text)) == [Piece(PieceKind.CONTENT, text)]


@each_family
def test_marks_within_quotes_are_text_even_as_tokens(family: Family) -> None:
    if not family.has_quotes:
        return
    rng = seeded(family.format)
    tokens, spelling = tokens_of(family), spelling_of(family)
    for _ in range(budget(5, 60)):
        calls = random_calls(rng, family, spelling.texts())
        ids = tokens.of(spelling.whole(family.write(calls)), spelling)
        pieces = read_alike(tokens, ids)
        assert calls_of(pieces) == same(respelled(calls, spelling.whole))
        assert text_of(pieces, PieceKind.CONTENT) == ""


@each_family
def test_text_and_marks_at_random_are_read_alike_however_tokens_are_bundled(
    family: Family,
) -> None:
    rng = seeded(family.format)
    tokens = tokens_of(family)
    for _ in range(budget(8, 200)):
        ids = at_random(rng, family, tokens)
        pieces = read_alike(tokens, ids)
        shown = "".join(piece.text for piece in pieces)
        assert "☺" in shown or "263a" in shown or is_in_stranger(tokens, ids), tokens.marked.decode(
            ids, skip_special_tokens=False
        )


def is_in_stranger(tokens: Tokens, ids: list[int]) -> bool:
    """Tell whether the character is in a member beside a call's own, in a tag of MiniMax M3's, or
    in an open tag of MiniCPM5's: these are not shown.
    """
    text = tokens.marked.decode(ids, skip_special_tokens=False)
    patterns = (_STRANGER, _NESTED_TAG, _OPEN_TAG)
    strangers = (found for pattern in patterns for found in pattern.finditer(text))
    return any("☺" in found.group() for found in strangers)


def at_random(rng: random.Random, family: Family, tokens: Tokens) -> list[int]:
    """An answer after some accidents, with one character that must not be lost."""
    text = family.write(random_calls(rng, family))
    ids = tokens.marked.encode(text).ids
    places = [at for at in range(len(ids) + 1) if not is_besides(family, text, tokens.end(ids, at))]
    at = rng.choice(places)
    parts = [ids[:at], ids[at:]]
    for _ in range(rng.randint(0, 3)):
        side = rng.randrange(2)
        parts[side] = damaged(rng, tokens, ids, parts[side])
    return [*parts[0], *tokens.spelled(" ☺ "), *parts[1]]


def damaged(rng: random.Random, tokens: Tokens, ids: list[int], part: list[int]) -> list[int]:
    """A part of an answer after one accident."""
    at = rng.randint(0, len(part))
    mark = rng.choice(sorted(tokens.marks) or ["{"])
    scraps = [tokens.spelled(mark), tokens.marked.encode(mark).ids, ids[: rng.randint(0, len(ids))]]
    behind = at + rng.randint(1, 3)
    return rng.choice([part[:at] + rng.choice(scraps) + part[at:], part[:at] + part[behind:]])


def test_thinking_marks_are_tokens_too() -> None:
    family = next(each for each in FAMILIES if each.format == "hermes")
    tokens = tokens_of(family)
    style = STYLES["think"]
    ids = [
        *tokens.marked.encode(style.begin).ids,
        *tokens.spelled(f"a {style.end} b"),
        *tokens.marked.encode(style.end).ids,
        *tokens.spelled("c"),
    ]
    assert read_alike(tokens, ids) == [
        Piece(PieceKind.REASONING, f"a {style.end} b"),
        Piece(PieceKind.CONTENT, "c"),
    ]
