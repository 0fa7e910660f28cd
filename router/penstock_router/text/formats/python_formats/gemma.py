"""Gemma 4 and FunctionGemma: `call:name{key:<|"|>text<|"|>,n:1}`, each call between two marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.reading.bare_keys import BareKeyNotation, BareKeyParser
from penstock_router.text.formats.reading.reader import SPACE, Misfit, Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import ANY_TEXT, among_text, one_or_more, tag

_CALL = "call:"


@dataclass(frozen=True)
class GemmaFormat(CallFormat):
    """Tool calls with marks around each, and no separators."""

    writes_plain_strings = True

    name: str
    # The marks around each call and each string; `result` is a mark that may follow the calls.
    begin: str
    end: str
    quote: str
    result: str

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.begin, self.end, self.quote, self.result

    def is_of(self, template: str) -> bool:
        return f"{self.begin}{_CALL}" in template

    def begins(self) -> tuple[str, ...]:
        return (self.begin,)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(self, tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        notation = BareKeyNotation(self.quote)
        tags = [
            tag(
                f"{self.begin}{_CALL}{tool.name}{{",
                notation.arguments(tool, rule) if rule.required or tool.strict else ANY_TEXT,
                f"}}{self.end}",
            )
            for tool in tools
        ]
        if rule.required:
            return one_or_more(tags, "", parallel=rule.parallel)
        return among_text(tags, self.begin, parallel=rule.parallel)


GEMMA4 = GemmaFormat("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
FUNCTION_GEMMA = GemmaFormat(
    "functiongemma",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<start_function_response>",
)


class _CallParser(BareKeyParser):
    def __init__(self, family: GemmaFormat, tools: Sequence[Tool], marks: Marks) -> None:
        super().__init__(family.quote, tools, marks)
        self._begin_mark, self._result = family.begin, family.result
        self._ends = (family.end,)
        strays = (family.end, family.result)
        self._strays = tuple(mark for mark in strays if marks.spelled(mark) != mark)

    def _read(self) -> Reading[None]:
        if (yield from self._until(self._begin_mark, *self._strays)) in self._strays:
            # A mark token without a call is not part of the text.
            self._drop()
            return
        yield from self._again(self._begin_mark)
        yield from self._one_call()
        yield from self._end_marks()
        while (yield from self._any_of(self._result)) is not None:
            yield from self._after_call()

    def _one_call(self) -> Reading[None]:
        yield from self._any_of(_CALL)
        yield from self._space()
        name = yield from self._name()
        if not self._is_callable(name):
            raise Misfit
        yield from self._space()
        self._announced, self._before, self._missing = name, "", ""
        yield from self._mended(self._bare_object(), 1)

    def _may_follow(self, rest: str) -> bool | None:
        """Tell whether this text may follow the last bracket: an end mark or another call."""
        rest = rest.lstrip(SPACE)
        if not rest:
            return None
        marks = map(self._marks.spelled, (*self._ends, self._begin_mark, self._result))
        follows = [(rest.startswith(mark), mark.startswith(rest)) for mark in marks]
        if any(is_there for is_there, _ in follows):
            return True
        return None if any(may_be for _, may_be in follows) else False
