"""MiniMax M2, 2.1, 2.5: all tool calls in one block, with names as attributes of their tags."""

from __future__ import annotations

from penstock_router.text.formats.reading.tagged_calls import TaggedFormat
from penstock_router.text.formats.reading.tags import Tags

MINIMAX_M2 = TaggedFormat(
    name="minimax_m2",
    tags=Tags(
        wrap=("<minimax:tool_call>", "</minimax:tool_call>"),
        is_one_block=True,
        function=('<invoke name="', '">', "</invoke>"),
        argument=('<parameter name="', '">', "</parameter>"),
    ),
    signs=("<minimax:tool_call>", "<invoke name="),
)
