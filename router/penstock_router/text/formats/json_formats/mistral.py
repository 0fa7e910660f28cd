"""Mistral: `[TOOL_CALLS]` and a list of objects, or a name and arguments for each tool call.

The newer form is `[TOOL_CALLS]name[ARGS]{..}`. Some models write `[CALL_ID]` and an id before
`[ARGS]`; others write no mark between name and arguments. In the older form an object may have an
id. All forms are read; forced calls have the template's form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_TEXT = regex("[a-zA-Z0-9]{9}")


@dataclass(frozen=True)
class MistralFormat(CallFormat):
    """A list of objects after one mark."""

    name: str = "mistral"
    marks: tuple[str, ...] = (_CALLS, _ID, _ARGUMENTS)
    has_ids: bool = False

    def is_of(self, template: str) -> bool:
        return _CALLS in template and _ARGUMENTS not in template

    def begins(self) -> tuple[str, ...]:
        return (_CALLS,)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        tags = [self._call_tag(tool, rule) for tool in tools]
        calls = one_or_more(tags, ", ", parallel=rule.parallel)
        if rule.required:
            return sequence(literal(f"{_CALLS}["), calls, literal("]"))
        among = tag(f"{_CALLS}[", calls, "]")
        return among_text([among], _CALLS, parallel=False)

    def for_template(self, template: str) -> MistralFormat:
        return replace(self, has_ids=', "id": "' in template)

    def _call_tag(self, tool: Tool, rule: CallRule) -> JsonObject:
        arguments = arguments_format(tool, rule)
        if self.has_ids:
            arguments = sequence(arguments, literal(', "id": "'), _ID_TEXT, literal('"'))
        name = json.dumps(tool.name, ensure_ascii=False)
        return tag(f'{{"name": {name}, "arguments": ', arguments, "}")


@dataclass(frozen=True)
class MistralNamedFormat(CallFormat):
    """A mark, a name, a mark and arguments for each tool call."""

    name: str = "mistral_named"
    marks: tuple[str, ...] = (_CALLS, _ID, _ARGUMENTS)
    has_ids: bool = False

    def is_of(self, template: str) -> bool:
        return _CALLS in template and _ARGUMENTS in template

    def begins(self) -> tuple[str, ...]:
        return (_CALLS,)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _CallParser(tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        tags = [self._call_tag(tool, rule) for tool in tools]
        if rule.required:
            return one_or_more(tags, "", parallel=rule.parallel)
        return among_text(tags, _CALLS, parallel=rule.parallel)

    def for_template(self, template: str) -> MistralNamedFormat:
        return replace(self, has_ids=_ID in template)

    def _call_tag(self, tool: Tool, rule: CallRule) -> JsonObject:
        arguments = arguments_format(tool, rule)
        if not self.has_ids:
            return tag(f"{_CALLS}{tool.name}{_ARGUMENTS}", arguments, "")
        content = sequence(_ID_TEXT, literal(_ARGUMENTS), arguments)
        return tag(f"{_CALLS}{tool.name}{_ID}", content, "")


class _CallParser(JsonCallParser):
    # A tool call ends before the next one at the latest.
    _ends = (_CALLS,)

    def _read(self) -> Reading[None]:
        if (yield from self._begin(_CALLS)) in "[{":
            was_call = yield from self._object_or_list()
        else:
            was_call = yield from self._named_call()
        if was_call:
            yield from self._brackets_too_many()
            yield from self._after_call()

    def _named_call(self) -> Reading[bool]:
        name = yield from self._name()
        if not self._is_callable(name):
            raise Misfit
        yield from self._space()
        if (yield from self._any_of(_ID)) is not None:
            yield from self._space()
            yield from self._name()
            yield from self._space()
        yield from self._any_of(_ARGUMENTS)
        if (yield from self._space()) != "{":
            raise Misfit
        self._call(name)
        yield from self._shown_value()
        return True
