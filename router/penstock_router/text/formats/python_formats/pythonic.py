"""Llama 3.2 and 4, Gemma 3: `[f(a=1, b="x"), g()]`, a Python list of calls with named arguments.

The list is the whole answer, or follows a mark, or is in a code fence named `tool_code` at the
answer's beginning. A list later in the text has no tool calls. In a fence and after a mark the
brackets may be missing. After a mark the calls may be JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.reading.json_calls import calls_or_text
from penstock_router.text.formats.reading.python_calls import BUILTIN, PythonCallParser, call_tags
from penstock_router.text.formats.reading.reader import Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import literal, one_or_more, sequence

_TAG, _BEGIN, _END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_FENCE, _TOOL_CODE = "```", "```tool_code"
_DESCRIBED = re.compile(r"\[\w+\(\w+=")


@dataclass(frozen=True)
class PythonicFormat(CallFormat):
    name: str = "pythonic"
    marks: tuple[str, ...] = (_TAG, _BEGIN, _END)

    def is_of(self, template: str) -> bool:
        return _BEGIN in template or _DESCRIBED.search(template) is not None

    def begins(self) -> tuple[str, ...]:
        return _TAG, _BEGIN

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        listed = one_or_more(call_tags(tools, rule), ", ", parallel=rule.parallel)
        calls = sequence(literal("["), listed, literal("]"))
        return calls if rule.required else calls_or_text(calls, "[")


class _CallParser(PythonCallParser):
    _ends = (_END, _FENCE)
    _suffix = BUILTIN
    _at_beginning = True

    def _read(self) -> Reading[None]:
        begins, self._at_beginning = self._at_beginning, False
        first = (yield from self._space()) if begins else ""
        self._is_marked = False
        if first == "[":
            yield from self._call_list()
            yield from self._end_marks()
            return
        if first != "`" or (yield from self._any_of(_TOOL_CODE)) is None:
            self._is_marked = True
            yield from self._begin(_TAG, _BEGIN)
        yield from self._marked_calls()
