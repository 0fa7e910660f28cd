"""Chat templates of families with tags: which format they show, what it reads of the calls that
they render, and that calls which are constrained look like those.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from support.families.tagged_reading import calls_of, read
from support.families.tagged_templates import OTHER_TEMPLATES, TEMPLATES
from unit.router.formats.test_forms import accepts, compiled

from penstock_router.request import Tool
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.reading.tagged_calls import TaggedFormat
from penstock_router.text.formats.registry import tool_format_of
from penstock_router.text.reasoning import ReasoningStyle, reasoning_begun, style_of

ALL = {name: (name, source) for name, source in TEMPLATES.items()} | OTHER_TEMPLATES
each_template = pytest.mark.parametrize(("name", "source"), ALL.values(), ids=list(ALL))

_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "place": {"type": "object", "properties": {"name": {"type": "string"}}},
        "on": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("get_weather", _PARAMETERS),
    Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
)
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("get_weather", {"city": "Oslo"})],
    [("now", {})],
    [("get_weather", {"city": "a\n<b> & é ", "days": 3, "on": True}), ("now", {})],
    [("now", {}), ("get_weather", {"city": "x", "on": False}), ("now", {})],
]


@functools.cache
def format_of(source: str) -> TaggedFormat:
    found = tool_format_of(source)
    assert isinstance(found, TaggedFormat)
    return found


def rendered(source: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls' text in a conversation of which they are the last turn but for their results."""
    given = [
        {"id": f"call{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": "Hm.", "tool_calls": given}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "a result"} for call in given
    ]
    text = ChatTemplate({"default": source}, {}).render(
        [{"role": "user", "content": "What now?"}, turn, *results],
        tools=[
            {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
            for tool in TOOLS
        ],
    )
    tags = format_of(source).tags
    end = tags.wrap[1] or tags.function[2]
    text = text.rpartition("Hm.")[2]
    return text[: text.rindex(end) + len(end)].strip()


@each_template
def test_a_template_shows_its_format(name: str, source: str) -> None:
    assert ChatTemplate({"default": source}, {}).takes_tools
    assert format_of(source).name == name


@each_template
def test_calls_that_the_template_renders_are_read(name: str, source: str) -> None:
    form = format_of(source)
    for calls in CALLS:
        assert calls_of(read(form, rendered(source, calls), tools=TOOLS)) == calls


@each_template
def test_calls_may_be_held_to_look_as_the_template_renders_them(name: str, source: str) -> None:
    form = format_of(source)
    for required in (True, False):
        grammar = compiled(form.calls(TOOLS, CallRule(required=required, parallel=True)))
        for calls in CALLS:
            text = rendered(source, calls)
            assert accepts(grammar, text), text
            assert accepts(grammar, f"Hm.{text}") is not required


@each_template
def test_calls_are_held_to_the_schema(name: str, source: str) -> None:
    form = format_of(source)
    grammar = compiled(form.calls(TOOLS, CallRule(required=True, parallel=False)))
    one, several, wrong = CALLS[0], CALLS[2], [("get_weather", {"days": 3})]
    assert accepts(grammar, rendered(source, one))
    assert not accepts(grammar, rendered(source, several))
    assert not accepts(grammar, rendered(source, wrong))
    assert not accepts(grammar, "Hm.")


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("glm", ("think", "<think>", "</think>")),
        ("seed_oss", ("seed", "<seed:think>", "</seed:think>")),
        ("minimax_m3", ("minimax_m3", "<mm:think>", "</mm:think>")),
        ("hy_v3, with a suffix", ("hy_v3", "<think:abc12>", "</think:abc12>")),
        ("step3", ("step3", "<think>", "</think>")),
    ],
)
def test_a_template_shows_its_style_of_reasoning(name: str, style: tuple[str, str, str]) -> None:
    found = style_of(ALL[name][1])
    assert found is not None
    assert (found.name, *found.marks) == style


def test_a_name_of_a_style_takes_the_suffix_from_the_template_too() -> None:
    found = style_of(ALL["hy_v3, with a suffix"][1], "hy_v4")
    assert found is not None
    assert found.marks == ("<think:abc12>", "</think:abc12>")
    plain = style_of("{{ 'nothing' }}", "hy_v3")
    assert plain is not None
    assert plain.marks == ("<think>", "</think>")


def test_reasoning_that_nobody_begins_has_begun_unless_the_prompt_ends_it() -> None:
    style = style_of(TEMPLATES["step3"])
    assert isinstance(style, ReasoningStyle)
    assert reasoning_begun("<|BOT|>assistant\n", style)
    assert not reasoning_begun("<|BOT|>assistant\n</think>\n", style)
    assert not reasoning_begun("<|BOT|>assistant\nOnce upon", style, "Once upon")
