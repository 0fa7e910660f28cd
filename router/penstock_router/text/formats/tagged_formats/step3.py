"""Step 3: tags, with marks around each tool call and around all calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock_router.request import Tool
from penstock_router.text.formats.base import ToolParser
from penstock_router.text.formats.reading.tagged_calls import TaggedCallParser, TaggedFormat
from penstock_router.text.formats.reading.tags import Tags
from penstock_router.text.marks import NO_MARKS, Marks

_CALLS, _CALLS_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"
_BEFORE = f"{_CALL}function{_SEPARATOR}"
_INVOKE, _INVOKE_END = '<steptml:invoke name="', "</steptml:invoke>"


@dataclass(frozen=True, kw_only=True)
class Step3Format(TaggedFormat):
    """Reads a tool call's marks apart from its tags, because either may be missing."""

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return TaggedCallParser(_READ, tools, marks)


_TAGS = Tags(
    wrap=(_CALLS, _CALLS_END),
    is_one_block=True,
    function=(f"{_BEFORE}{_INVOKE}", '">', f"{_INVOKE_END}{_CALL_END}"),
    argument=('<steptml:parameter name="', '">', "</steptml:parameter>"),
)
_READ = (
    replace(_TAGS, function=(f"{_BEFORE}{_INVOKE}", '">', _INVOKE_END)),
    replace(_TAGS, function=(f"{_BEFORE}\n{_INVOKE}", '">', _INVOKE_END), wrap=("", _CALL_END)),
    replace(_TAGS, function=(_INVOKE, '">', _INVOKE_END)),
)
STEP3 = Step3Format(
    name="step3",
    tags=_TAGS,
    token_parts=(_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR),
    signs=("<steptml:invoke", "<steptml:parameter"),
)
