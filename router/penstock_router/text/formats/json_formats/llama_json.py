"""Llama 3: `{"name": .., "parameters": {..}}` as the answer, or after `<|python_tag|>`.

Several objects are separated by `;`, a comma or whitespace. JSON later in the text is not a tool
call. After the mark, `name.call(a="b")` is a tool call too: so Llama 3.1 calls built-in tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.reading.json_calls import BareJsonParser, call_tag, calls_or_text
from penstock_router.text.formats.reading.python_calls import BUILTIN, PythonCallParser
from penstock_router.text.formats.reading.reader import Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import one_or_more

_MARK = "<|python_tag|>"


@dataclass(frozen=True)
class LlamaJsonFormat(CallFormat):
    name: str = "llama_json"
    marks: tuple[str, ...] = (_MARK,)

    def is_of(self, template: str) -> bool:
        has_role = "ipython" in template or _MARK in template
        return has_role and '"parameters"' in template

    def begins(self) -> tuple[str, ...]:
        return (_MARK,)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        tags = [call_tag(tool, '{"name": ', ', "parameters": ', "}", rule) for tool in tools]
        calls = one_or_more(tags, "; ", parallel=rule.parallel)
        return calls if rule.required else calls_or_text(calls, "[{")


class _CallParser(BareJsonParser, PythonCallParser):
    _suffix = BUILTIN

    def _read(self) -> Reading[None]:
        begins, self._at_beginning = self._at_beginning, False
        self._is_marked = not (begins and (yield from self._space()) in "{[")
        if self._is_marked and (yield from self._begin(_MARK)) not in "{[":
            # Code may also follow the mark, so only the request's functions count.
            self._is_marked = False
            yield from self._call_row()
            yield from self._end_marks()
        else:
            yield from self._several()
