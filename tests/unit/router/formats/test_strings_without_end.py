"""A string that has no end within a call: where marks are tokens, the call has one nevertheless."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.random_calls import written_calls

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import PieceKind, content_of, join_pieces
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.marks import TOKEN, Marks

_TOOLS = (Tool("search"),)
_MARKS = Marks(dict(enumerate(["<tool_call>", "</tool_call>", "<think>", "</think>"])))
_LOST = '[b]{"name": "search", "arguments": {"query": "lost'


def hermes_in_tokens(text: str, *, was_cut: bool = False) -> tuple[str, list[Any]]:
    """Return the content and the calls that are read where `[b]` and `[e]` are the marks' tokens.
    Check that they are the same however tokens are bundled.
    """
    for short, mark in (("[b]", "<tool_call>"), ("[e]", "</tool_call>")):
        text = text.replace(short, TOKEN + mark)
    tokens = re.findall(f"{TOKEN}</?tool_call>|.", text, re.DOTALL)
    found = []
    for size in (1, 2, 3, len(tokens)):
        parser = FORMATS["hermes"].parser(_TOOLS, _MARKS)
        pieces = []
        for at in range(0, len(tokens), size):
            pieces += parser.feed("".join(tokens[at : at + size]))
        found.append(join_pieces([*pieces, *parser.flush(was_cut=was_cut)]))
    assert all(each == found[0] for each in found)
    return (content_of(found[0]), [(name, parsed(text)) for name, text in written_calls(found[0])])


def parsed(arguments: str) -> Any:
    """The arguments; as text where they are not whole."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


@pytest.mark.parametrize(
    "end",
    ["[e]", "[e]\n", "[e][e]", "[e]\n[e]\n", "[e][b]", '"}[e]', '"[e]'],
)
def test_the_token_of_the_calls_end_ends_a_string_if_nothing_follows(end: str) -> None:
    assert hermes_in_tokens(_LOST + end) == ("", [("search", {"query": "lost"})])


@pytest.mark.parametrize(
    ("begun", "arguments"),
    [
        ('[b]{"name": "search", "arguments": {"query', {"query": None}),
        ('[b]{"name": "search", "arguments": {"query": ["a", "b', {"query": ["a", "b"]}),
        ('[b]{"name": "search", "arguments": {"query": "C:\\\\', {"query": "C:\\"}),
        ('[b]{"name": "search", "arguments": {"query": "C:\\', {"query": "C:\\"}),
        ('[b]{"name": "search", "arguments": {"query": "C:\\u00', {"query": "C:\\u00"}),
        ('[b]{"name": "search", "arguments": {"query": "[b]', {"query": "<tool_call>"}),
    ],
)
def test_what_is_missing_of_a_string_is_completed(begun: str, arguments: dict[str, Any]) -> None:
    assert hermes_in_tokens(f"{begun}[e]") == ("", [("search", arguments)])


@pytest.mark.parametrize(
    "inner", ["[e]", "[b]", "[e]\n", "[e] [e] ", "[e]a[e]", "[b][e][b]", "[e]'"]
)
def test_a_token_within_a_string_that_goes_on_is_text(inner: str) -> None:
    meant = inner.replace("[b]", "<tool_call>").replace("[e]", "</tool_call>")
    for rest in ('"}}[e]', ' x"}}\n[e]', '"}}'):
        expected = f"lost{meant}{rest[: rest.index(chr(34))]}"
        assert hermes_in_tokens(_LOST + inner + rest) == ("", [("search", {"query": expected})])


def test_a_string_that_was_cut_off_behind_such_a_token_stays_as_it_is() -> None:
    for end in ("[e]", "[e]\n"):
        content, calls = hermes_in_tokens(_LOST + end, was_cut=True)
        assert (content, calls) == ("", [("search", '{"query": "lost')])


def test_held_back_is_only_what_may_be_marks_at_the_end() -> None:
    parser = FORMATS["hermes"].parser(_TOOLS, _MARKS)
    shown = ""
    for text, expected in (
        (_LOST.removeprefix("[b]"), "lost"),
        (f"{TOKEN}<tool_call>", "lost<tool_call>"),
        (f" a{TOKEN}</tool_call>", "lost<tool_call> a"),
        ("\n ", "lost<tool_call> a"),
        ("b", "lost<tool_call> a</tool_call>\\n b"),
    ):
        begun = "" if shown else f"{TOKEN}<tool_call>"
        pieces = parser.feed(begun + text)
        shown += "".join(piece.text for piece in pieces if piece.kind is PieceKind.ARGUMENTS)
        assert shown == f'{{"query": "{expected}'


def test_white_space_without_end_behind_such_a_token_is_gone_over_once() -> None:
    parser: Any = FORMATS["hermes"].parser(_TOOLS, _MARKS)
    parser.feed(_LOST.replace("[b]", f"{TOKEN}<tool_call>") + f"{TOKEN}</tool_call>")
    for _ in range(1_000):
        parser.feed("\n")
        assert len(parser._text) - parser._at < 40
