"""Cohere: tool calls (Cohere says actions) between marks; each has a number as its id.

Command R of 2024 writes them in a code block after "Action:".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.reading.json_calls import (
    JsonCallParser,
    arguments_format,
    call_tag,
)
from penstock_router.text.formats.reading.marked_json import MarkedJson
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import (
    among_text,
    literal,
    one_or_more,
    regex,
    sequence,
    tag,
)

_WORD, _FENCE = "Action:", "```"
_BEGIN, _BETWEEN, _END = f"{_WORD}\n{_FENCE}json\n[\n    ", ",\n    ", f"\n]{_FENCE}"


@dataclass(frozen=True, kw_only=True)
class _CohereFormat(MarkedJson):
    def call(self, tool: Tool, before: str, behind: str, rule: CallRule) -> JsonObject:
        """Match an action; the id is its number in the conversation."""
        name = json.dumps(tool.name, ensure_ascii=False)
        content = sequence(
            regex("(0|[1-9][0-9]{0,5})"),
            literal(f'", "tool_name": {name}, "parameters": '),
            arguments_format(tool, rule),
        )
        return tag(f'{before}{{"tool_call_id": "', content, f"}}{behind}")


# Command R7B, Command A and later models.
COHERE = _CohereFormat(
    name="cohere",
    begin="<|START_ACTION|>",
    end="<|END_ACTION|>",
    is_list=True,
    listed=("[\n    ", ",\n    ", "\n]"),
)


@dataclass(frozen=True)
class CommandRFormat(CallFormat):
    """A list in a code block. Only a word marks it, so only the request's functions count."""

    name: str = "command_r"
    marks: tuple[str, ...] = ()

    def is_of(self, template: str) -> bool:
        has_actions = _WORD in template and '"tool_name"' in template
        return has_actions and COHERE.begin not in template

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        before, between = '{\n        "tool_name": ', ',\n        "parameters": '
        tags = [call_tag(tool, before, between, "\n    }", rule) for tool in tools]
        calls = one_or_more(tags, _BETWEEN, parallel=rule.parallel)
        if rule.required:
            return sequence(literal(_BEGIN), calls, literal(_END))
        return among_text([tag(_BEGIN, calls, _END)], f"{_WORD}\n{_FENCE}", parallel=False)


class _CallParser(JsonCallParser):
    _ends = (f"\n{_FENCE}", _FENCE)

    def _read(self) -> Reading[None]:
        self._is_marked = False
        yield from self._begin(_WORD)
        if (yield from self._any_of(_FENCE)) is not None:
            yield from self._name()
        if (yield from self._space()) not in "[{":
            raise Misfit
        if (yield from self._object_or_list()):
            yield from self._ended()
