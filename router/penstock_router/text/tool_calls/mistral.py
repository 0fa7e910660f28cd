"""Mistral: `[TOOL_CALLS]` and a list of objects, or a name and its arguments for each call.

The newer form is `[TOOL_CALLS]name[ARGS]{..}`; some models write `[CALL_ID]` and an id before
`[ARGS]`, others no marker between name and arguments. Answers are read in any of these forms,
whichever the model's template has; forced calls are written in the template's form.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.structural_tag_builder import (
    among_text,
    json_format,
    literal,
    one_or_more,
    sequence,
    tag,
)
from penstock_router.text.tool_calls.base import Misfit, Reading, ToolParser
from penstock_router.text.tool_calls.json_calls import JsonCallParser, arguments_schema, call_tag

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


@dataclass(frozen=True, slots=True)
class MistralFormat:
    """A list of objects after one marker."""

    name: str = "mistral"
    markers: tuple[str, ...] = (_CALLS, _ID, _ARGUMENTS)

    def is_of(self, template: str) -> bool:
        """The template has the marker of calls and not that of arguments."""
        return _CALLS in template and _ARGUMENTS not in template

    def parser(self, names: Collection[str]) -> ToolParser:
        """A parser for one answer."""
        return _CallParser(names)

    def calls(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> JsonObject:
        """One marker, and all calls in one list."""
        tags = [
            call_tag(tool, '{"name": ', ', "arguments": ', "}", required=required) for tool in tools
        ]
        calls = one_or_more(tags, ", ", parallel=parallel)
        if required:
            return sequence(literal(f"{_CALLS}["), calls, literal("]"))
        among = tag(f"{_CALLS}[", calls, "]")
        return among_text([among], _CALLS, parallel=False)


@dataclass(frozen=True, slots=True)
class MistralNamedFormat:
    """A marker, a name, a marker, arguments: for each call."""

    name: str = "mistral_named"
    markers: tuple[str, ...] = (_CALLS, _ID, _ARGUMENTS)

    def is_of(self, template: str) -> bool:
        """The template has both markers."""
        return _CALLS in template and _ARGUMENTS in template

    def parser(self, names: Collection[str]) -> ToolParser:
        """A parser for one answer."""
        return _CallParser(names)

    def calls(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> JsonObject:
        """Calls without a separator."""
        tags = [
            tag(
                f"{_CALLS}{tool.name}{_ARGUMENTS}",
                json_format(arguments_schema(tool, required=required)),
                "",
            )
            for tool in tools
        ]
        if required:
            return one_or_more(tags, "", parallel=parallel)
        return among_text(tags, _CALLS, parallel=parallel)


class _CallParser(JsonCallParser):
    def _read(self) -> Reading[None]:
        yield from self._until(_CALLS)
        while (yield from self._any_of(_CALLS)) is not None:
            # A repeated marker means nothing more.
            pass
        if (yield from self._space()) in "[{":
            was_call = yield from self._object_or_list()
        else:
            was_call = yield from self._named_call()
        if was_call:
            yield from self._after_call()

    def _named_call(self) -> Reading[bool]:
        name = yield from self._name()
        if name not in self._names:
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
        yield from self._value(shown=True)
        return True
