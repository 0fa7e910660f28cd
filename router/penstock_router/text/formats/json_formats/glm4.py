"""GLM-4 before 4.5: the function's name on a line, its arguments on the next.

The answer begins with the name. There is no mark, so only the request's functions count.
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
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import either, one_or_more, tag

_ASSISTANT = "<|assistant|>"


@dataclass(frozen=True)
class Glm4Format(CallFormat):
    name: str = "glm4"
    marks: tuple[str, ...] = (_ASSISTANT,)

    def is_of(self, template: str) -> bool:
        return all(text in template for text in ("[gMASK]", "<|observation|>")) and (
            "<arg_key>" not in template
        )

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(tools, marks)

    def calls_in_words(self, calls: Sequence[NamedArguments]) -> str:
        return _ASSISTANT.join([f"{name}\n{arguments}" for name, arguments in calls])

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        tags = [tag(f"{tool.name}\n", arguments_format(tool, rule), "") for tool in tools]
        calls = one_or_more(tags, _ASSISTANT, parallel=rule.parallel)
        if rule.required:
            return calls
        names = [f"{tool.name}\n" for tool in tools]
        return either([calls, {"type": "any_text", "excludes": names}])


class _CallParser(JsonCallParser):
    _at_beginning = True

    def _read(self) -> Reading[None]:
        self._is_marked = False
        if not self._at_beginning:
            yield from self._until(_ASSISTANT)
        self._at_beginning = False
        yield from self._space()
        yield from self._any_of(_ASSISTANT)
        name = yield from self._name()
        if not self._is_callable(name):
            raise Misfit
        yield from self._any_of("\r")
        yield from self._expect("\n")
        if (yield from self._space()) != "{":
            raise Misfit
        self._call(name)
        yield from self._shown_value()
        yield from self._brackets_too_many(_ASSISTANT)
        yield from self._after_call()
