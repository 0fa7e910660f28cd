"""xLAM 2: the answer is a JSON list, even of one tool call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.json_formats.plain_json import PlainJsonFormat
from penstock_router.text.formats.reading.json_calls import call_tag, calls_or_text
from penstock_router.text.structural_tag_builder import literal, one_or_more, sequence


@dataclass(frozen=True)
class XlamFormat(PlainJsonFormat):
    name: str = "xlam"

    def is_of(self, template: str) -> bool:
        """Tell whether the template has the family's placeholder for a function's name."""
        return '"tool_call_name"' in template

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        tags = [call_tag(tool, '{"name": ', ', "arguments": ', "}", rule) for tool in tools]
        listed = one_or_more(tags, ", ", parallel=rule.parallel)
        calls = sequence(literal("["), listed, literal("]"))
        return calls if rule.required else calls_or_text(calls, "[{`")


XLAM = XlamFormat()
