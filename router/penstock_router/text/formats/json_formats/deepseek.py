"""DeepSeek: each tool call is between two marks, and all calls are between two more.

V3 writes the word "function", a mark, the name, and the arguments in a code block. V3.1 writes the
name, a mark and the arguments. Both forms are read.
"""

from __future__ import annotations

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
from penstock_router.text.formats.reading.json_calls import JsonCallParser, arguments_format
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.marks import NO_MARKS, TOKEN, Marks
from penstock_router.text.structural_tag_builder import (
    among_text,
    literal,
    one_or_more,
    sequence,
    tag,
)

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_MARKS = (_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END)
# Distilled models write these in place of `_CALLS`, which is not one of their tokens.
_OTHER_CALLS = ("<｜tool_calls_begin｜>", "<｜tool calls begin｜>", "<｜tool▁calls｜>")
_FENCE = "```"
_KIND = "function"


@dataclass(frozen=True)
class DeepSeekFormat(CallFormat):
    name: str
    # Syntax before a call's name, between name and arguments, after the arguments, and between
    # calls.
    _before: str
    _between: str
    _behind: str
    _apart: str
    _fenced: bool
    marks: tuple[str, ...] = _MARKS

    def is_of(self, template: str) -> bool:
        return _CALL in template and (f"{_FENCE}json" in template) == self._fenced

    def begins(self) -> tuple[str, ...]:
        return _CALLS, _CALL, *_OTHER_CALLS

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(tools, marks)

    def calls_in_words(self, calls: Sequence[NamedArguments]) -> str:
        shown = [
            f"{_CALL}{self._before}{name}{self._between}{arguments}{self._behind}{_CALL_END}"
            for name, arguments in calls
        ]
        return f"{_CALLS}{self._apart.join(shown)}{_CALLS_END}"

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        tags = [
            tag(
                f"{_CALL}{self._before}{tool.name}{self._between}",
                arguments_format(tool, rule),
                f"{self._behind}{_CALL_END}",
            )
            for tool in tools
        ]
        calls = one_or_more(tags, self._apart, parallel=rule.parallel)
        if rule.required:
            return sequence(literal(_CALLS), calls, literal(_CALLS_END))
        among = tag(_CALLS, calls, _CALLS_END)
        return among_text([among], _CALLS, parallel=False)


DEEPSEEK_V3 = DeepSeekFormat(
    "deepseek_v3", f"{_KIND}{_SEPARATOR}", f"\n{_FENCE}json\n", f"\n{_FENCE}", "\n", True
)
DEEPSEEK_V31 = DeepSeekFormat("deepseek_v31", "", _SEPARATOR, "", "", False)


class _CallParser(JsonCallParser):
    _ends = (f"\n{_FENCE}", _FENCE, _CALL_END, _CALLS_END)

    def _read(self) -> Reading[None]:
        yield from self._begin(_CALLS, _CALL, *_OTHER_CALLS)
        yield from self._calls_in_section(self._one_call, _CALL, _CALL_END, _CALLS_END)

    def _one_call(self) -> Reading[None]:
        yield from self._space()
        name = yield from self._name()
        yield from self._space()
        yield from self._expect(_SEPARATOR)
        fenced = False
        first = yield from self._space()
        if name == _KIND and first not in "{<" and first != TOKEN:
            name = yield from self._name()
            yield from self._space()
            fenced = (yield from self._any_of(_FENCE)) is not None
            if fenced:
                yield from self._name()
            first = yield from self._space()
        if not self._is_callable(name):
            raise Misfit
        if first == "{":
            self._call(name)
            yield from self._shown_value()
            yield from self._brackets_too_many()
        yield from self._end(name, begun=first == "{", fenced=fenced)

    def _end(self, name: str, *, begun: bool, fenced: bool) -> Reading[None]:
        """Read the end of a tool call. A call without arguments is shown only here."""
        yield from self._space()
        if fenced:
            yield from self._any_of(_FENCE)
        yield from self._space()
        if not begun:
            if (yield from self._any_of(_CALL_END, _CALLS_END)) is None:
                raise Misfit
            self._call(name, "{}")
        else:
            yield from self._any_of(_CALL_END)
