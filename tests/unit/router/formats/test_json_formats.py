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
from penstock_router.text.answer_reader import make_reader
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.formats.base import CallFormat, CallRule
from penstock_router.text.formats.channels import ChannelFormat
from penstock_router.text.formats.registry import FORMATS, tool_format_of
from penstock_router.text.marks import NO_MARKS
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.reasoning import STYLES, style_of

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
    formats = Conventions(FORMATS[name], STYLES[style])
    reader = make_reader(formats, TOOLS, NO_MARKS, begun=begun)
    pieces = join_pieces([*reader.feed(text), *reader.flush()])
    one_by_one = make_reader(formats, TOOLS, NO_MARKS, begun=begun)
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
    name = family.format
    tool_format = FORMATS[name]
    separators = ", ", ": "
    for parallel in (True, False):
        form = tool_format.calls(
            TOOLS, CallRule(required=True, parallel=parallel, separators=separators)
        )
        grammar = grammar_of_form(form)
        assert is_of_form(grammar, family.write([DAYS]))
        assert not is_of_form(grammar, family.write([("get_weather", {"town": "x"})]))
        assert not is_of_form(grammar, family.says_alone("It is warm."))
        if family.is_parallel:
            assert is_of_form(grammar, family.write([PARIS, OSLO])) is parallel
    free = tool_format.calls(TOOLS, CallRule(required=False, parallel=True))
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
    calls = [DAYS, ("get_weather", {"city": "Oslo"})] if family.is_parallel else [DAYS]
    said = [_shown(call, number) for number, call in enumerate(calls)]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": said},
    ]
    text = ChatTemplate({"default": source}, {}).render(messages, tools=[{"type": "function"}])
    form = tool_format.calls(TOOLS, CallRule(required=True, parallel=True, separators=(", ", ": ")))
    grammar = grammar_of_form(form)
    ends = [text[start:end] for start, end in _parts(text, family.write(calls))]
    assert any(is_of_form(grammar, part) for part in ends), text


def _parts(text: str, written: str) -> list[tuple[int, int]]:
    """Return the start and end of each part of a prompt that begins and ends as `written` does."""
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


# ---- Errors that all families with marks make --------------------------------------------------

_WITH_ENDS = [one for one in FAMILIES if one.has_marks and one.begin and one.end.strip() != "]"]


@pytest.mark.parametrize("family", _WITH_ENDS, ids=lambda one: one.format)
def test_marks_that_are_missing_or_doubled_change_nothing(family: Family) -> None:
    text = family.write([DAYS])
    assert read(family.format, text.removesuffix(family.end)) == ("", [DAYS])
    assert read(family.format, text + family.end) == ("", [DAYS])
    assert read(family.format, f"{text}\n{family.end}\n") == ("", [DAYS])
    assert read(family.format, family.begin + text) == ("", [DAYS])
    assert read(family.format, f"{family.begin}\n{text}") == ("", [DAYS])


@pytest.mark.parametrize("family", _WITH_ENDS, ids=lambda one: one.format)
def test_a_mention_of_a_mark_is_content(family: Family) -> None:
    text = f"The mark {family.begin} begins a call, {family.end.strip()} ends it."
    assert read(family.format, text) == (text, [])


@each_family
def test_json_that_is_nearly_right_is_mended(family: Family) -> None:
    text = family.write([("get_weather", {"city": "Paris"})])
    for wrong in ("{'city': 'Paris'}", '{"city": "Paris",}', "{city: 'Paris'}"):
        assert read(family.format, text.replace('{"city": "Paris"}', wrong)) == ("", [PARIS])
    raw = text.replace("Paris", "Pa\nris\t")
    assert read(family.format, raw) == ("", [("get_weather", {"city": "Pa\nris\t"})])
    truth = text.replace('"Paris"', "True")
    assert read(family.format, truth) == ("", [("get_weather", {"city": True})])


@each_family
def test_a_call_that_is_cut_stays_as_far_as_it_came(family: Family) -> None:
    text = family.write([PARIS])
    cut = text[: text.index("ris")]
    assert read(family.format, cut, was_cut=True) == ("", [("get_weather", '{"city": "Pa')])


def test_a_bare_key_before_half_of_an_end_mark_is_shown() -> None:
    text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{city<｜t"
    reader = FORMATS["deepseek_v31"].parser([Tool("now")])
    pieces = join_pieces([*reader.feed(text), *reader.flush(was_cut=True)])
    shown = [piece.text for piece in pieces if piece.kind is PieceKind.ARGUMENTS]
    assert "".join(shown) == "{city"


@each_family
def test_arguments_are_shown_while_they_come(family: Family) -> None:
    text = family.write([("get_weather", {"city": "x" * 4_000})])
    parser = FORMATS[family.format].parser(TOOLS)
    begun = text[: text.index("xx") + 2_000]
    pieces = [piece for character in begun for piece in parser.feed(character)]
    shown = sum(len(piece.text) for piece in pieces if piece.kind is PieceKind.ARGUMENTS)
    assert shown >= 2_000


# ---- Mistral and DeepSeek ----------------------------------------------------------------------


def test_mistral_is_forced_to_write_the_ids_of_its_template_and_no_others() -> None:
    with_ids = "[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}"
    without = "[TOOL_CALLS]now[ARGS]{}"
    small = tool_format_of("{{ tools }}[TOOL_CALLS]..[CALL_ID]..[ARGS]")
    plain = tool_format_of("{{ tools }}[TOOL_CALLS]..[ARGS]")
    for tool_format, right, wrong in ((small, with_ids, without), (plain, without, with_ids)):
        assert tool_format is not None
        form = tool_format.calls(TOOLS, CallRule(required=True, parallel=True))
        assert is_of_form(grammar_of_form(form), right)
        assert not is_of_form(grammar_of_form(form), wrong)
        assert read(tool_format, right) == read(tool_format, wrong) == ("", [("now", {})])


def test_mistral_calls_within_reasoning_that_is_not_ended_count() -> None:
    text = '[THINK]I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
    assert answer("mistral_named", "mistral", text) == ("I look.", "", [PARIS])


@pytest.mark.parametrize(
    "begin",
    [
        "<｜tool▁calls▁begin｜>",
        "<｜tool_calls_begin｜>",
        "<｜tool calls begin｜>",
        "<｜tool▁calls｜>",
        "",
    ],
)
def test_distilled_models_begin_their_calls_in_several_ways(begin: str) -> None:
    family = next(one for one in FAMILIES if one.format == "deepseek_v3")
    text = family.write([PARIS, OSLO]).replace("<｜tool▁calls▁begin｜>", begin)
    assert read("deepseek_v3", f"I look.\n{text}") == ("I look.", [PARIS, OSLO])
    assert read("deepseek_v31", text) == ("", [PARIS, OSLO])


# ---- Traps of single families ------------------------------------------------------------------

_WITH = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
_OTHER = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
_WHOLE = (
    '{"id": "call_1", "type": "function", "function": {"name": "get_weather", '
    '"arguments": "{\\"city\\": \\"Paris\\"}"}}'
)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("granite", f"<tool_call>[{_WITH}]", "", [PARIS]),
        ("granite", f"<tool_call>[{_WITH}]</tool_call>", "", [PARIS]),
        ("granite", f"<|tool_call|>{_WITH}", "", [PARIS]),
        ("granite", f"<|tool_call|> [{_OTHER}] So.", "So.", [PARIS]),
        ("granite_20b_fc", f"<function_call>{_WITH}\n<function_call>{_WITH}", "", [PARIS, PARIS]),
        ("tool_calls", f"<tool_calls>\n{_WITH}\n{_WITH}\n</tool_calls>", "", [PARIS, PARIS]),
        ("tool_calls", f"<tool_calls>[{_WITH}]]</tool_calls>", "", [PARIS]),
        (
            "tool_calls",
            '<tool_calls>[{"name": "now", "arguments": {}, "id": "x"}]</tool_calls>',
            "",
            [("now", {})],
        ),
        ("minimax_m1", f"<tool_calls>[{_WITH}]</tool_calls>", "", [PARIS]),
        ("minimax_m1", f"<tool_calls>\n{_WITH}", "", [PARIS]),
        ("nemotron", f"<TOOLCALL>{_WITH}</TOOLCALL>", "", [PARIS]),
        ("phi4_mini", f"functools[{_WITH}]", "", [PARIS]),
        ("functools", f"<|tool_call|>[{_WITH}]<|/tool_call|>", "", [PARIS]),
        ("functools", f" functools[{_WITH}]", "", [PARIS]),
        ("functools", "Use functools, e.g. functools[0].", "Use functools, e.g. functools[0].", []),
        (
            "internlm",
            f"I look.<|action_start|><|plugin|>\n{_OTHER}<|action_end|>",
            "I look.",
            [PARIS],
        ),
        (
            "internlm",
            "<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
            "<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
            [],
        ),
        (
            "exaone4",
            f"<tool_call>\n{_WITH}\n</tool_call><tool_call>{_WITH}</tool_call>",
            "",
            [PARIS, PARIS],
        ),
        ("falcon", f"<tool_call>\n[{_WHOLE}]\n</tool_call>", "", [PARIS]),
        ("falcon", f"<tool_call>\n{_WITH}\n</tool_call>", "", [PARIS]),
        (
            "falcon",
            "<tool_call>\n{'arguments': {'city': 'Paris'}, 'name': 'get_weather'}\n</tool_call>",
            "",
            [PARIS],
        ),
        ("hermes", f"<tool_call>\n[{_WITH}, {_WITH}]\n</tool_call>", "", [PARIS, PARIS]),
        ("k2_horizon", f"<ifm|tool_call>{_WITH}</ifm|tool_call>", "", [PARIS]),
        (
            "k2_horizon",
            '<ifm|tool_call>{"name":123,"arguments":{}}</ifm|tool_call>',
            '<ifm|tool_call>{"name":123,"arguments":{}}</ifm|tool_call>',
            [],
        ),
        ("longcat", f"<longcat_tool_call>{_WITH}</longcat_tool_call>", "", [PARIS]),
        # The name is the only key; forms of other families count as well.
        ("apertus", '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>', "", [("now", {})]),
        ("apertus", '<|tools_prefix|>[{"get_weather": "{\\"city\\": \\"Paris\\"}"}]', "", [PARIS]),
        ("apertus", f"<|tools_prefix|>[{_WITH}]<|tools_suffix|>", "", [PARIS]),
        (
            "apertus",
            '<|tools_prefix|>{"get_weather": {"city": "Paris"}}<|tools_suffix|>',
            "",
            [PARIS],
        ),
        ("apertus", '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}', "", [PARIS]),
        # An argument of a call whose name was damaged is no call.
        (
            "apertus",
            '<|tools_prefix|>[{"get_weathe {y": "Paris", "extra": {}}]<|tools_suffix|>',
            '<|tools_prefix|>[{"get_weathe {y": "Paris", "extra": {}}]<|tools_suffix|>',
            [],
        ),
        # Behind the mark of a role, or behind the mark of a call.
        (
            "gigachat3",
            f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_WITH}<|message_sep|>\n\n",
            "",
            [PARIS],
        ),
        ("gigachat3", f"I look.function call<|role_sep|>\n{_WITH}", "I look.", [PARIS]),
        ("gigachat3", f"<|function_call|><|function_call|>{_WITH}<|message_sep|>", "", [PARIS]),
        ("gigachat3", "A function call is a call.", "A function call is a call.", []),
        ("cohere", f"<|START_ACTION|>[{_WITH}]<|END_ACTION|>", "", [PARIS]),
        (
            "cohere",
            '<|START_ACTION|>[\n    {"tool_call_id": 0, "tool_name": "get_weather", '
            '"parameters": {"city": "Paris"}},\n]<|END_ACTION|>',
            "",
            [PARIS],
        ),
        (
            "command_r",
            'Plan: I look.\nAction: ```json\n[{"tool_name": "get_weather", "parameters": '
            '{"city": "Paris"}}]\n```\n',
            "Plan: I look.",
            [PARIS],
        ),
        ("command_r", 'Action:\n[{"tool_name": "now", "parameters": {}}]', "", [("now", {})]),
        (
            "command_r",
            'Action:\n```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```',
            'Action:\n```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```',
            [],
        ),
        (
            "functionary_v3_1",
            '<function=now></function><function=get_weather>{"city": "Paris"}'
            "</function></function>",
            "",
            [("now", {}), PARIS],
        ),
        ("functionary_v3_1", "Write <function=name> for it.", "Write <function=name> for it.", []),
        ("functionary_v3_2", 'all\nI look.\n>>>get_weather\n{"city": "Paris"}', "I look.", [PARIS]),
        (
            "functionary_v3_2",
            '>>>get_weather\n{"city": "Paris"}>>>now\n{}',
            "",
            [PARIS, ("now", {})],
        ),
        (
            "functionary_v3_2",
            "all\nIn Python: >>> f(x)\n>>> all",
            "In Python: >>> f(x)\n>>> all",
            [],
        ),
        ("functionary_v3_2", "It is warm.", "It is warm.", []),
        ("functionary_v3_2", "python\nprint(1)", "python\nprint(1)", []),
        ("xlam", "[]", "[]", []),
        ("xlam", f"```json\n[{_WITH}]\n```", "", [PARIS]),
        ("xlam", '[{"name": "Ann", "arguments": {}}]', '[{"name": "Ann", "arguments": {}}]', []),
        ("xlam", "[1, 2]", "[1, 2]", []),
        ("llama_json", f"<|python_tag|>{_OTHER}; {_WITH}", "", [PARIS, PARIS]),
    ],
)
def test_traps_of_single_families(name: str, text: str, content: str, calls: list[Call]) -> None:
    assert read(name, text) == (content, calls)


def test_gigachat_is_forced_to_write_what_its_template_has() -> None:
    old = tool_format_of("{{ tools }}<|role_sep|>{'role': 'function call'}")
    new = tool_format_of("{{ tools }}<|role_sep|><|function_call|>")
    call = '{"name": "now", "arguments": {}}'
    texts = (f"<|message_sep|>\n\nfunction call<|role_sep|>\n{call}", f"<|function_call|>{call}")
    for tool_format, text in zip((old, new), texts, strict=True):
        assert tool_format is not None
        form = tool_format.calls(TOOLS, CallRule(required=True, parallel=True))
        assert [is_of_form(grammar_of_form(form), each) for each in texts] == [
            each == text for each in texts
        ]


def test_functionary_is_read_without_tools_too() -> None:
    tool_format = FORMATS["functionary_v3_2"]
    assert isinstance(tool_format, ChannelFormat)
    parser = tool_format.channels(())
    assert content_of([*parser.feed("al"), *parser.feed("l\nHello"), *parser.flush()]) == "Hello"
    assert (parser.has_reasoning, parser.in_reasoning) == (False, False)


# ---- Reasoning ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "style", "begun", "text", "expected"),
    [
        (
            "cohere",
            "cohere",
            False,
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi.<|END_RESPONSE|>",
            ("Hm.", "Hi.", []),
        ),
        ("cohere", "cohere", False, "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", ("", "Hi.", [])),
        (
            "cohere",
            "cohere_text",
            True,
            "Hm.<|END_THINKING|><|START_TEXT|>\nHi.\n<|END_TEXT|>",
            ("Hm.", "Hi.", []),
        ),
        (
            "cohere",
            "cohere",
            True,
            'Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
            '"tool_name": "get_weather", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>',
            ("Hm.", "", [PARIS]),
        ),
        (
            "hermes",
            "think_response",
            True,
            f"Hm.\n</think>\n\n\n<tool_call>\n{_WITH}\n</tool_call>\n",
            ("Hm.", "", [PARIS]),
        ),
        (
            "hermes",
            "think_response",
            True,
            "Hm.\n</think>\n\n<response>\nHi.\n</response>\n",
            ("Hm.", "Hi.", []),
        ),
        (
            "granite",
            "think_response",
            False,
            "<think>Hm.</think><response>Hi.</response>",
            ("Hm.", "Hi.", []),
        ),
        (
            "tool_calls",
            "think_answer",
            False,
            f"<think>\nHm.\n</think>\n<answer>\n<tool_calls>[{_WITH}]</tool_calls>\n</answer>",
            ("Hm.", "", [PARIS]),
        ),
        (
            "tool_calls",
            "apriel",
            True,
            "Hm.\n[BEGIN FINAL RESPONSE]\n Hi.\n[END FINAL RESPONSE]\n",
            ("Hm.", "Hi.", []),
        ),
        (
            "tool_calls",
            "apriel",
            False,
            "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\n"
            f"<tool_calls>[{_WITH}]</tool_calls>",
            ("Hm.", "", [PARIS]),
        ),
        ("apertus", "apertus", False, "<|inner_prefix|>Hm.<|inner_suffix|>Hi.", ("Hm.", "Hi.", [])),
        (
            "apertus",
            "apertus",
            False,
            '<|inner_prefix|>Hm.<|tools_prefix|>[{"get_weather": '
            '{"city": "Paris"}}]<|tools_suffix|>',
            ("Hm.", "", [PARIS]),
        ),
    ],
)
def test_reasoning_and_the_marks_around_answers_are_told_from_content(
    name: str, style: str, begun: bool, text: str, expected: tuple[str, str, list[Call]]
) -> None:
    assert answer(name, style, text, begun=begun) == expected


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>", "cohere"),
        ("<|START_THINKING|><|END_THINKING|><|START_TEXT|>", "cohere_text"),
        ("<think></think> and <response></response>", "think_response"),
        ("<global_setting></global_setting><response>..</think>", "think_response"),
        ("<think></think><answer></answer>", "think_answer"),
        ("<think></think> results: <response>1</response>", "think"),
        ("[BEGIN FINAL RESPONSE]", "apriel"),
        ("<|inner_prefix|><|inner_suffix|>", "apertus"),
    ],
)
def test_a_template_shows_the_style_of_its_reasoning(template: str, style: str) -> None:
    found = style_of(template)
    assert found is not None
    assert found.name == style
