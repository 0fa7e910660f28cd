"""Llama 3.2 and 4, Gemma 3: `[f(a=1, b="x"), g()]`, a Python list of calls with named arguments.

The list is the answer, or follows a mark; a list later in the text has no calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import FREE_WRITING, CallFormat, ToolParser, Writing
from penstock_router.text.formats.reading.json_calls import calls_or_text
from penstock_router.text.formats.reading.python_calls import PythonCallParser, call_tags
from penstock_router.text.formats.reading.reader import Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import literal, one_or_more, sequence

_TAG, _BEGIN, _END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
# How templates describe the format.
_DESCRIBED = re.compile(r"\[\w+\(\w+=")


@dataclass(frozen=True)
class PythonicFormat(CallFormat):
    """The answer is a list of calls."""

    name: str = "pythonic"
    marks: tuple[str, ...] = (_TAG, _BEGIN, _END)

    def is_of(self, template: str) -> bool:
        """The template shows such a list, or the mark of Llama 4."""
        return _BEGIN in template or _DESCRIBED.search(template) is not None

    def begins(self) -> tuple[str, ...]:
        """The marks that may stand before a list."""
        return _TAG, _BEGIN

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        """A parser for one answer."""
        return _CallParser(tools, marks)

    def calls(
        self,
        tools: Sequence[Tool],
        *,
        required: bool,
        parallel: bool,
        writing: Writing = FREE_WRITING,
    ) -> JsonObject:
        """A list of calls."""
        listed = one_or_more(call_tags(tools, required=required), ", ", parallel=parallel)
        calls = sequence(literal("["), listed, literal("]"))
        return calls if required else calls_or_text(calls, "[")


class _CallParser(PythonCallParser):
    _at_beginning = True

    def _read(self) -> Reading[None]:
        begins, self._at_beginning = self._at_beginning, False
        self._is_marked = not (begins and (yield from self._space()) == "[")
        if self._is_marked:
            yield from self._begin(_TAG, _BEGIN)
        yield from self._call_list()
        yield from self._any_of(_END)
        yield from self._after_call()
