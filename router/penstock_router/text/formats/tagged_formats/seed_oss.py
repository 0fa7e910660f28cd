"""Seed-OSS: Qwen3-Coder's tags in a tag of its own, without line breaks around values."""

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
