"""Qwen3-Coder, Qwen 3.5 and later, Nemotron 3, Step 3.5, Granite 4.2: tags within `<tool_call>`;
and MiMo V2, which writes no line breaks around values.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_router.text.formats.reading.tagged_calls import TaggedFormat
from penstock_router.text.formats.reading.tags import Tags, are_rendered

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


class _MimoFormat(TaggedFormat):
    def is_of(self, template: str) -> bool:
        return super().is_of(template) and are_rendered(template, self.tags)


MIMO = _MimoFormat(name="mimo", tags=replace(QWEN_XML.tags, padding=""), signs=QWEN_XML.signs)
