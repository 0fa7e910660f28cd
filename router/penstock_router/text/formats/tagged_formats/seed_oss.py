"""Seed-OSS: the tags of Qwen3-Coder without line breaks around values, and its own tag around
calls.
"""

from __future__ import annotations

from penstock_router.text.formats.reading.tagged_calls import TaggedFormat
from penstock_router.text.formats.reading.tags import Tags

SEED_OSS = TaggedFormat(
    name="seed_oss",
    tags=Tags(
        wrap=("<seed:tool_call>", "</seed:tool_call>"),
        function=("<function=", ">", "</function>"),
        argument=("<parameter=", ">", "</parameter>"),
    ),
    signs=("<seed:tool_call>", "<function="),
)
