"""Models without tools in their templates: a system message asks for answers in JSON.

An answer is an object or a list of objects, perhaps in a code fence. JSON later in the text is not
a tool call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.reading.json_calls import BareJsonParser, call_tag, calls_or_text
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import either, literal, one_or_more, sequence

_FENCE = "```"


@dataclass(frozen=True)
class PlainJsonFormat(CallFormat):
    name: str = "plain_json"
    marks: tuple[str, ...] = ()

    def is_of(self, template: str) -> bool:
        return "tools" not in template

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        tags = [call_tag(tool, '{"name": ', ', "arguments": ', "}", rule) for tool in tools]
        calls = one_or_more(tags, "", parallel=False)
        if rule.parallel:
            listed = one_or_more(tags, ", ", parallel=True)
            calls = either([calls, sequence(literal("["), listed, literal("]"))])
        return calls if rule.required else calls_or_text(calls, "[{`")


def instructions(tools: Iterable[Tool], tool_format: CallFormat | None = None) -> str:
    """Write a system message that describes the tools, for models without tools in their templates.
    It asks for calls in the format's own syntax, if the format defines it.
    """
    described = "\n".join([json.dumps(_described(tool), ensure_ascii=False) for tool in tools])
    return (
        "You can call these functions. Each line describes one, with a JSON schema of its "
        f"arguments:\n\n{described}\n\n{_how_to_call(tool_format)} "
        "Where no call helps, answer in plain words."
    )


def _how_to_call(tool_format: CallFormat | None) -> str:
    example = "NAME", '{"ARGUMENT": "VALUE"}'
    words = tool_format and tool_format.calls_in_words([example])
    if not words:
        return (
            'To call one, answer with {"name": its name, "arguments": an object with its '
            "arguments} and nothing else. To call several, answer with a JSON list of such objects."
        )
    return (
        f"To call one, answer in this form, with its name and its arguments:\n\n{words}\n\n"
        "Several calls may follow one another."
    )


def _described(tool: Tool) -> JsonObject:
    function = tool.shown.get("function", {})
    described = {"name": tool.name}
    if function.get("description"):
        described["description"] = function["description"]
    return described | {"parameters": tool.parameters or {"type": "object"}}


class _CallParser(BareJsonParser):
    def _read(self) -> Reading[None]:
        if not self._at_beginning:
            yield from self._rest()
        self._at_beginning = self._is_marked = False
        yield from self._space()
        fenced = (yield from self._any_of(_FENCE)) is not None
        if fenced:
            yield from self._name()
        if (yield from self._space()) not in "{[":
            raise Misfit
        if (yield from self._several()) and fenced:
            yield from self._any_of(_FENCE)
            yield from self._after_call()

    def _rest(self) -> Reading[None]:
        """Read all remaining text as content."""
        self._fits = False
        while True:
            self._take(len(self._text))
            self._give_back()
            yield from self._more()
