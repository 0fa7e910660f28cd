"""Hermes, Qwen 2.5, Qwen 3: `<tool_call>`, an object, `</tool_call>`, any number of times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.structural_tag_builder import among_text, one_or_more
from penstock_router.text.tool_calls.base import Misfit, Reading, ToolParser
from penstock_router.text.tool_calls.json_calls import JsonCallParser, call_tag

_BEGIN, _END = "<tool_call>", "</tool_call>"
# What other families write after the same marker.
_OTHERS = ("<function=", "<arg_key>")


@dataclass(frozen=True, slots=True)
class HermesFormat:
    """An object between two markers."""

    name: str = "hermes"
    markers: tuple[str, ...] = (_BEGIN, _END)

    def is_of(self, template: str) -> bool:
        """The template has the marker, and nothing that other families write after it."""
        return _BEGIN in template and not any(other in template for other in _OTHERS)

    def parser(self, names: Collection[str]) -> ToolParser:
        """A parser for one answer."""
        return _CallParser(names)

    def calls(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> JsonObject:
        """Each call between its markers, on lines of its own."""
        tags = [
            call_tag(
                tool,
                f'{_BEGIN}\n{{"name": ',
                ', "arguments": ',
                f"}}\n{_END}",
                required=required,
            )
            for tool in tools
        ]
        if required:
            return one_or_more(tags, "\n", parallel=parallel)
        return among_text(tags, _BEGIN, parallel=parallel)


class _CallParser(JsonCallParser):
    def _read(self) -> Reading[None]:
        yield from self._until(_BEGIN)
        if (yield from self._space()) not in "{[":
            raise Misfit
        # Some models write several objects between one pair of markers.
        while (yield from self._object_or_list()):
            if (yield from self._space()) not in "{[":
                yield from self._any_of(_END)
                yield from self._after_call()
                return
