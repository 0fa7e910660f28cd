"""Models whose template knows no tools: the whole answer is JSON, as a system message asks.

An object or a list of them, in a code fence or not. JSON further on in the text is no call.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from penstock_router.fields import JsonObject
from penstock_router.request import Tool
from penstock_router.tool_calls.base import Misfit, Reading, ToolParser
from penstock_router.tool_calls.json_calls import (
    BareJsonReader,
    call_tag,
    calls_or_text,
    literal,
    one_or_more,
    sequence,
)

_FENCE = "```"


@dataclass(frozen=True, slots=True)
class PlainJsonFormat:
    """JSON that is the answer."""

    name: str = "plain_json"
    markers: tuple[str, ...] = ()

    def is_of(self, template: str) -> bool:
        """It does not know of tools."""
        return "tools" not in template

    def parser(self, names: Collection[str]) -> ToolParser:
        """For one answer."""
        return _Reader(names)

    def calls(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> JsonObject:
        """One object; a list of them where there may be several."""
        tags = [
            call_tag(tool, '{"name": ', ', "arguments": ', "}", required=required) for tool in tools
        ]
        calls = one_or_more(tags, ", ", parallel=parallel)
        if parallel:
            calls = sequence(literal("["), calls, literal("]"))
        return calls if required else calls_or_text(calls, "[{`")


def instructions(tools: Iterable[Tool]) -> str:
    """What a system message says of them to a model whose template cannot."""
    described = "\n".join([json.dumps(_described(tool), ensure_ascii=False) for tool in tools])
    return (
        "You can call these functions. Each line describes one, with a JSON schema of its "
        f"arguments:\n\n{described}\n\n"
        'To call one, answer with {"name": its name, "arguments": an object with its arguments} '
        "and nothing else. To call several, answer with a JSON list of such objects. "
        "Where no call helps, answer in plain words."
    )


def _described(tool: Tool) -> JsonObject:
    function = tool.shown.get("function", {})
    described = {"name": tool.name}
    if function.get("description"):
        described["description"] = function["description"]
    return described | {"parameters": tool.parameters or {"type": "object"}}


class _Reader(BareJsonReader):
    def _read(self) -> Reading[None]:
        if not self._at_beginning:
            yield from self._rest()
        self._at_beginning = False
        yield from self._space()
        fenced = (yield from self._any_of(_FENCE)) is not None
        if fenced:
            yield from self._name()
        if (yield from self._space()) not in "{[":
            raise Misfit
        if (yield from self._several()) and fenced:
            yield from self._any_of(_FENCE)
            yield from self._after_call()

    def _rest(self) -> Reading[None]:
        """It is content, all of it, and stays so."""
        self._fits = False
        while True:
            self._take(len(self._text))
            self._give_back()
            yield from self._more()
