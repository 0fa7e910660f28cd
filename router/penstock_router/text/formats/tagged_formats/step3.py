"""Step 3: tags of its own within marks, of which each call and all of them have a pair."""

from __future__ import annotations

from dataclasses import replace

from penstock_router.text.formats.reading.tagged_calls import TaggedFormat
from penstock_router.text.formats.reading.tags import Spaces, Tags

_CALLS, _CALLS_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"
_INVOKE, _INVOKE_END = '<steptml:invoke name="', "</steptml:invoke>"

_TAGS = Tags(
    wrap=(_CALLS, _CALLS_END),
    is_one_block=True,
    function=(f"{_CALL}function{_SEPARATOR}{_INVOKE}", '">', f"{_INVOKE_END}{_CALL_END}"),
    argument=('<steptml:parameter name="', '">', "</steptml:parameter>"),
)
STEP3 = TaggedFormat(
    name="step3",
    tags=_TAGS,
    spaces=Spaces(),
    others=(
        # The marks of a call may be missing, or stand in lines of their own.
        replace(_TAGS, function=(_INVOKE, '">', _INVOKE_END)),
        replace(
            _TAGS,
            wrap=("", _CALL_END),
            function=(f"{_CALL}function{_SEPARATOR}\n{_INVOKE}", '">', _INVOKE_END),
        ),
    ),
    token_parts=(_CALL, _CALL_END, _SEPARATOR),
    signs=("<steptml:invoke", "<steptml:parameter"),
)
