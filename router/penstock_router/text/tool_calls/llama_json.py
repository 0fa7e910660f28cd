"""Llama 3: `{"name": .., "parameters": {..}}` as the answer, or after `<|python_tag|>`.

Several are separated by `;`, a comma or white space. JSON later in the text is not a call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.structural_tag_builder import one_or_more
from penstock_router.text.tool_calls.base import Misfit, Reading, ToolParser
from penstock_router.text.tool_calls.json_calls import BareJsonParser, call_tag, calls_or_text

_MARKER = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class LlamaJsonFormat:
    """The answer is an object."""

    name: str = "llama_json"
    markers: tuple[str, ...] = (_MARKER,)

    def is_of(self, template: str) -> bool:
        """The template has a role or the marker of Llama 3, and calls with parameters."""
        has_role = "ipython" in template or _MARKER in template
        return has_role and '"parameters"' in template

    def parser(self, names: Collection[str]) -> ToolParser:
        """A parser for one answer."""
        return _CallParser(names)

    def calls(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> JsonObject:
        """Objects in the order and spacing of the template; several as `{..}; {..}`."""
        tags = [
            call_tag(tool, '{"name": ', ', "parameters": ', "}", required=required)
            for tool in tools
        ]
        calls = one_or_more(tags, "; ", parallel=parallel)
        return calls if required else calls_or_text(calls, "[{")


class _CallParser(BareJsonParser):
    def _read(self) -> Reading[None]:
        begins, self._at_beginning = self._at_beginning, False
        if begins and (yield from self._space()) in "{[":
            yield from self._several()
        else:
            yield from self._until(_MARKER)
            if (yield from self._space()) not in "{[":
                raise Misfit
            yield from self._several()
