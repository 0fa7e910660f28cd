"""OLMo 3: a call on each line, `f(a="x")`, all between two marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.reading.python_calls import MarkedPythonParser, call_tags
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import (
    among_text,
    literal,
    one_or_more,
    sequence,
    tag,
)

_BEGIN, _END = "<function_calls>", "</function_calls>"


@dataclass(frozen=True)
class OlmoFormat(CallFormat):
    name: str = "olmo3"
    marks: tuple[str, ...] = (_BEGIN, _END)

    def is_of(self, template: str) -> bool:
        return _BEGIN in template and "<functions>" in template

    def begins(self) -> tuple[str, ...]:
        return (_BEGIN,)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return MarkedPythonParser(_BEGIN, _END, tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        tags = call_tags(tools, rule)
        listed = one_or_more(tags, "\n", parallel=rule.parallel)
        if rule.required:
            return sequence(literal(_BEGIN), listed, literal(_END))
        return among_text([tag(_BEGIN, listed, _END)], _BEGIN, parallel=False)
