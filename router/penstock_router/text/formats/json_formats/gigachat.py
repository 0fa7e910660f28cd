"""GigaChat 3: an object after a mark, or in a message with its own role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.reading.json_calls import JsonCallParser, call_tag
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import among_text, one_or_more

_CALL, _ROLE_END, _MESSAGE_END = "<|function_call|>", "<|role_sep|>", "<|message_sep|>"
_ROLE = "function call"


@dataclass(frozen=True)
class GigaChatFormat(CallFormat):
    name: str = "gigachat3"
    marks: tuple[str, ...] = (_CALL, _ROLE_END, _MESSAGE_END)
    # True if a tool call is a message with its own role, as in the family's first models.
    is_message: bool = False

    def is_of(self, template: str) -> bool:
        return _ROLE_END in template and (_CALL in template or f"'{_ROLE}'" in template)

    def begins(self) -> tuple[str, ...]:
        return (_CALL,)

    def for_template(self, template: str) -> GigaChatFormat:
        return replace(self, is_message=_CALL not in template)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        """Match one tool call, because templates do not render several."""
        begin = f"{_MESSAGE_END}\n\n{_ROLE}{_ROLE_END}\n" if self.is_message else _CALL
        before, between = f'{begin}{{"name": ', ', "arguments": '
        tags = [call_tag(tool, before, between, "}", rule) for tool in tools]
        if rule.required:
            return one_or_more(tags, "", parallel=False)
        return among_text(tags, begin, parallel=False)


class _CallParser(JsonCallParser):
    _ends = (_MESSAGE_END,)

    def _read(self) -> Reading[None]:
        mark = yield from self._until(_CALL, _MESSAGE_END, _ROLE)
        if mark == _MESSAGE_END:
            # This mark may also end the answer; then it is syntax.
            self._fits = True
            yield from self._space()
            yield from self._expect(_ROLE)
            self._fits = False
        if mark != _CALL:
            yield from self._expect(_ROLE_END)
        if (yield from self._again(_CALL)) != "{":
            raise Misfit
        if (yield from self._object()):
            yield from self._ended()


GIGACHAT = GigaChatFormat()
