"""LFM2, LFM2.5 and LFM3: a Python list of calls between two marks.

If the marks are hidden or forgotten, the list is the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import (
    CallFormat,
    CallRule,
    NamedArguments,
    ToolParser,
)
from penstock_router.text.formats.reading.python_calls import (
    MarkedPythonParser,
    PythonNotation,
    call_tags,
)
from penstock_router.text.formats.reading.reader import Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import (
    among_text,
    literal,
    one_or_more,
    sequence,
    tag,
)

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"
# Texts in the family's templates, even those that render no tool calls.
_SIGNS = (_BEGIN, "<|tool_list_start|>", "List of tools: [")
_NOTATION = PythonNotation()


@dataclass(frozen=True)
class LfmFormat(CallFormat):
    name: str = "lfm2"
    marks: tuple[str, ...] = (_BEGIN, _END)

    def is_of(self, template: str) -> bool:
        return any(sign in template for sign in _SIGNS)

    def begins(self) -> tuple[str, ...]:
        return (_BEGIN,)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(_BEGIN, _END, tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        tags = call_tags(tools, rule, notation=_NOTATION)
        listed = one_or_more(tags, ", ", parallel=rule.parallel)
        opens, closes = f"{_BEGIN}[", f"]{_END}"
        if rule.required:
            return sequence(literal(opens), listed, literal(closes))
        return among_text([tag(opens, listed, closes)], _BEGIN, parallel=False)

    def calls_in_words(self, calls: Sequence[NamedArguments]) -> str:
        return f"{_BEGIN}[{', '.join([_written(*call) for call in calls])}]{_END}"


def _written(name: str, arguments: str) -> str:
    given = json.loads(arguments or "{}")
    written = ", ".join([f"{key}={_NOTATION.written(value)}" for key, value in given.items()])
    return f"{name}({written})"


class _CallParser(MarkedPythonParser):
    _at_beginning = True

    def _read(self) -> Reading[None]:
        begins, self._at_beginning = self._at_beginning, False
        self._is_marked = not (begins and (yield from self._space()) == "[")
        if self._is_marked:
            yield from super()._read()
        else:
            yield from self._call_list()
            yield from self._end_marks()
