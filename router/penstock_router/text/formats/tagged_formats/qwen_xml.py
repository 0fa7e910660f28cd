"""Qwen3-Coder, Qwen 3.5 and later, Nemotron 3, Step 3.5, Granite 4.2: tags within `<tool_call>`."""

from __future__ import annotations

from penstock_router.text.formats.reading.tagged_calls import TaggedFormat
from penstock_router.text.formats.reading.tags import Tags

QWEN_XML = TaggedFormat(
    name="qwen_xml",
    tags=Tags(
        wrap=("<tool_call>", "</tool_call>"),
        function=("<function=", ">", "</function>"),
        argument=("<parameter=", ">", "</parameter>"),
        padding="\n",
    ),
    signs=("<tool_call>", "<function=", "<parameter="),
)
