"""Formats whose calls have JSON as arguments: what models of each family are known to write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.answer_forms import grammar_of_form, is_of_form
from support.families.family import Call, Family
from support.families.json_families import FAMILIES
from support.families.json_templates import TEMPLATES

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import PieceKind, content_of, join_pieces
from penstock_router.text.answer_reader import AnswerReader
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.formats.base import CallFormat, Writing
from penstock_router.text.formats.registry import FORMATS, tool_format_of
from penstock_router.text.marks import NO_MARKS
from penstock_router.text.reasoning import STYLES

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = Tool("now", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, NOW, Tool("add-up"))
PARIS: Call = ("get_weather", {"city": "Paris"})
OSLO: Call = ("get_weather", {"city": "Oslo"})
DAYS: Call = ("get_weather", {"city": "Bad [x]", "days": 3, "tags": ["a]", "}"]})


def read(name: str | CallFormat, text: str, *, was_cut: bool = False) -> tuple[str, list[Any]]:
    """The content, and the calls; the same wherever the text is cut."""
    read_at_once = _read(name, [text], was_cut)
    assert _read(name, list(text), was_cut) == read_at_once
    for cut in range(1, len(text)):
        assert _read(name, [text[:cut], text[cut:]], was_cut) == read_at_once, cut
    return read_at_once


def _read(name: str | CallFormat, parts: list[str], was_cut: bool) -> tuple[str, list[Any]]:
    tool_format = FORMATS[name] if isinstance(name, str) else name
    parser = tool_format.parser(TOOLS)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    pieces = join_pieces([*pieces, *parser.flush(was_cut=was_cut)])
    names = [piece.text for piece in pieces if piece.kind is PieceKind.CALL]
    arguments = [""] * len(names)
    for piece in pieces:
        if piece.kind is PieceKind.ARGUMENTS:
            arguments[piece.call] += piece.text
    return content_of(pieces), list(zip(names, map(_value, arguments), strict=True))


def _value(arguments: str) -> Any:
    """The arguments; as text where they were cut off."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def answer(name: str, style: str, text: str, *, begun: bool = False) -> tuple[str, str, list[Call]]:
    """The reasoning, the content and the calls of a whole answer."""
    reader = AnswerReader(STYLES[style], FORMATS[name], TOOLS, NO_MARKS, begun=begun)
    pieces = join_pieces([*reader.feed(text), *reader.flush()])
    one_by_one = AnswerReader(STYLES[style], FORMATS[name], TOOLS, NO_MARKS, begun=begun)
    parts = [piece for character in text for piece in one_by_one.feed(character)]
    assert join_pieces([*parts, *one_by_one.flush()]) == pieces
    reasoning = [piece.text for piece in pieces if piece.kind is PieceKind.REASONING]
    names = [piece.text for piece in pieces if piece.kind is PieceKind.CALL]
    given = [piece.text for piece in pieces if piece.kind is PieceKind.ARGUMENTS]
    calls = list(zip(names, map(json.loads, given), strict=True))
    return "".join(reasoning), content_of(pieces), calls


each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.format)


@each_family
def test_what_a_family_writes_is_read(family: Family) -> None:
    calls = [PARIS, DAYS, ("now", {})] if family.is_parallel else [DAYS]
    assert read(family.format, family.write(calls)) == ("", calls)
    if family.says_before is not None:
        text = family.says_before("Let me see.") + family.write([OSLO])
        assert read(family.format, text) == ("Let me see.", [OSLO])


@each_family
def test_a_call_of_an_unknown_function_counts_behind_a_mark_only(family: Family) -> None:
    text = family.write([("launch", {"at": 1})])
    expected = ("", [("launch", {"at": 1})]) if family.has_marks else (text, [])
    assert read(family.format, text) == expected


@each_family
def test_what_a_family_writes_is_what_is_forced(family: Family) -> None:
    tool_format = FORMATS[family.format]
    writing = Writing((", ", ": "))
    for parallel in (True, False):
        form = tool_format.calls(TOOLS, required=True, parallel=parallel, writing=writing)
        grammar = grammar_of_form(form)
        assert is_of_form(grammar, family.write([DAYS]))
        assert not is_of_form(grammar, family.write([("get_weather", {"town": "x"})]))
        assert not is_of_form(grammar, family.says_alone("It is warm."))
        if family.is_parallel:
            assert is_of_form(grammar, family.write([PARIS, OSLO])) is parallel
    free = tool_format.calls(TOOLS, required=False, parallel=True)
    grammar = grammar_of_form(free)
    assert is_of_form(grammar, family.write([DAYS]))
    assert is_of_form(grammar, family.says_alone("It is warm."))


def _shown(call: Call, number: int) -> dict[str, Any]:
    function = {"name": call[0], "arguments": call[1]}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_format_and_renders_what_is_forced(name: str) -> None:
    source = TEMPLATES[name]
    tool_format = tool_format_of(source)
    assert tool_format is not None
    assert tool_format.name == name
    family = next(one for one in FAMILIES if one.format == name)
    calls = [DAYS, OSLO] if family.is_parallel else [DAYS]
    said = [_shown(call, number) for number, call in enumerate(calls)]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": said},
    ]
    text = ChatTemplate({"default": source}, {}).render(messages, tools=[{"type": "function"}])
    form = tool_format.calls(TOOLS, required=True, parallel=True, writing=Writing((", ", ": ")))
    grammar = grammar_of_form(form)
    ends = [text[start:end] for start, end in _parts(text, family.write(calls))]
    assert any(is_of_form(grammar, part) for part in ends), text


def _parts(text: str, written: str) -> list[tuple[int, int]]:
    """Where, in a prompt, an answer like this one may stand."""
    starts = [at for at in range(len(text)) if text.startswith(written[:6], at)]
    ends = [at for at in range(len(text) + 1) if text[:at].endswith(written[-2:])]
    return [(start, end) for start in starts for end in ends if start < end]


# ---- Kimi K2 -----------------------------------------------------------------------------------

_KIMI_CALL = '<|tool_call_begin|>%s<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
_KIMI = f"<|tool_calls_section_begin|>{_KIMI_CALL}<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (_KIMI % "functions.get_weather:0", "", [PARIS]),
        (_KIMI % "get_weather:12", "", [PARIS]),
        (_KIMI % "functions.get_weather", "", [PARIS]),
        (_KIMI % "functions.add-up:3", "", [("add-up", {"city": "Paris"})]),
        (_KIMI % " functions.a.b:c:7 ", "", [("a.b:c", {"city": "Paris"})]),
        # The marks of all calls are missing.
        (_KIMI_CALL % "functions.get_weather:0", "", [PARIS]),
        # The marks are written twice; white space stands around them.
        (
            "<|tool_calls_section_begin|>\n<|tool_calls_section_begin|>\n"
            + _KIMI_CALL % "functions.get_weather:0"
            + "\n<|tool_call_end|>\n<|tool_calls_section_end|>\n<|tool_calls_section_end|>\n",
            "",
            [PARIS],
        ),
        (f"I look. {_KIMI % 'functions.get_weather:0'} Done.", "I look.Done.", [PARIS]),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
            "<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>",
            "",
            [("now", {})],
        ),
        (
            '<|tool_call_begin|>functions.get_weather:0{"city": "Paris"}<|tool_call_end|>',
            "",
            [PARIS],
        ),
        (
            "The mark <|tool_call_begin|> begins a call.",
            "The mark <|tool_call_begin|> begins a call.",
            [],
        ),
    ],
)
def test_kimi_k2_names_a_function_by_the_id_of_the_call(
    text: str, content: str, calls: list[Call]
) -> None:
    assert read("kimi_k2", text) == (content, calls)


def test_a_kimi_call_has_its_number_in_its_id() -> None:
    assert FORMATS["kimi_k2"].call_id("add-up", 3) == "functions.add-up:3"


def test_a_kimi_section_within_reasoning_that_is_not_ended_counts() -> None:
    text = f"<think>I should look it up. {_KIMI % 'functions.get_weather:0'}"
    assert answer("kimi_k2", "think", text) == ("I should look it up.", "", [PARIS])
