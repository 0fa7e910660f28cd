"""Apertus: a list between marks, of objects that have the function's name as their only key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallRule, ToolParser
from penstock_router.text.formats.reading.json_calls import Call, arguments_format
from penstock_router.text.formats.reading.marked_json import MarkedJson, MarkedJsonParser
from penstock_router.text.formats.reading.reader import Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import tag

# Keys of tool calls in other families' forms, which are also read.
_OTHERS = frozenset({"name", "arguments", "parameters", "function"})


@dataclass(frozen=True, kw_only=True)
class _ApertusFormat(MarkedJson):
    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(self, tools, marks)

    def call(self, tool: Tool, before: str, behind: str, rule: CallRule) -> JsonObject:
        name = json.dumps(tool.name, ensure_ascii=False)
        content = arguments_format(tool, rule)
        return tag(f"{before}{{{name}: ", content, f"}}{behind}")


class _CallParser(MarkedJsonParser):
    def _keyed(self, call: Call, key: str, first: str) -> Reading[bool]:
        # A key whose value is an object may be an unknown function's name; after unknown members,
        # it belongs to a damaged call.
        may_be_unknown = first == "{" and key not in _OTHERS and not call.has_strangers
        is_name = key in self._tools or may_be_unknown
        if call.name is None and call.early is None and is_name and self._is_callable(key):
            call.name = key
            return (yield from self._given(call, first))
        return (yield from super()._keyed(call, key, first))


APERTUS = _ApertusFormat(
    name="apertus", begin="<|tools_prefix|>", end="<|tools_suffix|>", is_list=True
)
