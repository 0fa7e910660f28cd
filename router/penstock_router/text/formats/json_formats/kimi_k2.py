"""Kimi K2: each tool call is between two marks, and all calls are between two more.

The id of a tool call stands before its arguments: `functions.`, the function's name, `:`, and the
call's number in the conversation, from 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.reading.json_calls import JsonCallParser, arguments_format
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

_CALLS, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_PREFIX = "functions."
_NUMBER = re.compile(r":\d+$")


@dataclass(frozen=True)
class KimiK2Format(CallFormat):
    name: str = "kimi_k2"
    marks: tuple[str, ...] = (_CALLS, _CALL, _ARGUMENTS, _CALL_END, _CALLS_END)

    def is_of(self, template: str) -> bool:
        return _CALLS in template

    def begins(self) -> tuple[str, ...]:
        return _CALLS, _CALL

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        number = regex("(0|[1-9][0-9]{0,5})")
        tags = [
            tag(
                f"{_CALL}{_PREFIX}{tool.name}:",
                sequence(
                    number,
                    literal(_ARGUMENTS),
                    arguments_format(tool, rule),
                ),
                _CALL_END,
            )
            for tool in tools
        ]
        calls = one_or_more(tags, "", parallel=rule.parallel)
        if rule.required:
            return sequence(literal(_CALLS), calls, literal(_CALLS_END))
        return among_text([tag(_CALLS, calls, _CALLS_END)], _CALLS, parallel=False)

    def call_id(self, name: str, number: int) -> str:
        return f"{_PREFIX}{name}:{number}"


class _CallParser(JsonCallParser):
    _ends = (_CALL_END, _CALLS_END)

    def _read(self) -> Reading[None]:
        yield from self._begin(_CALLS, _CALL)
        yield from self._calls_in_section(self._one_call, _CALL, _CALL_END, _CALLS_END)

    def _one_call(self) -> Reading[None]:
        yield from self._space()
        name = self._name_of((yield from self._name()))
        if not self._is_callable(name):
            raise Misfit
        yield from self._space()
        mark = yield from self._any_of(_ARGUMENTS)
        if (yield from self._space()) == "{":
            self._call(name)
            yield from self._shown_value()
            yield from self._brackets_too_many()
        elif mark is None or (yield from self._ahead(*self._ends)) is None:
            raise Misfit
        else:
            self._call(name, "{}")

    def _name_of(self, header: str) -> str:
        name = header.removeprefix(_PREFIX)
        if header in self._tools or name in self._tools:
            return name if name in self._tools else header
        return _NUMBER.sub("", name)


KIMI_K2 = KimiK2Format()
