"""MiniCPM5: tags without whitespace between them; strings may be CDATA sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.argument_kinds import Kinds
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import ToolParser
from penstock_router.text.formats.reading.named_arguments import Argument
from penstock_router.text.formats.reading.reader import Reading
from penstock_router.text.formats.reading.tagged_calls import TaggedCallParser, TaggedFormat
from penstock_router.text.formats.reading.tags import Spaces, Tags
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import ANY_TEXT, either, regex, tag

_SECTION, _SECTION_END = "<![CDATA[", "]]>"


@dataclass(frozen=True, kw_only=True)
class MiniCpm5Format(TaggedFormat):
    """Writes a value with `<`, `&` or a newline as a CDATA section."""

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _MiniCpm5Parser((self.tags,), tools, marks)

    def _text_format(self, tool: Tool, argument: Argument) -> JsonObject:
        text = super()._text_format(tool, argument)
        if tool.text_format is not None:
            return tag(_SECTION, text, _SECTION_END)
        if text != ANY_TEXT:
            return text
        return either([tag(_SECTION, ANY_TEXT, _SECTION_END), regex(r"[^<&\n]*")])


class _MiniCpm5Parser(TaggedCallParser):
    def _argument_value(self, kinds: Kinds) -> Reading[None]:
        if (yield from self._any_of(_SECTION)) is None:
            yield from super()._argument_value(kinds)
            return
        self._drop()
        outside = self._by_padded
        ends = [self._marks.spelled(end) for end in self._argument_ends]
        self._look_for(
            {
                f"{_SECTION_END}{space}{end}": mark
                for end, mark in zip(ends, self._argument_ends, strict=True)
                for space in ("", "\n")
            }
        )
        yield from super()._argument_value(kinds)
        self._look_for(outside)


MINICPM5 = MiniCpm5Format(
    name="minicpm5",
    tags=Tags(
        wrap=("", ""),
        function=('<function name="', '">', "</function>"),
        argument=('<param name="', '">', "</param>"),
    ),
    spaces=Spaces(name="", argument=""),
    signs=("<function name=", "<param name="),
)
