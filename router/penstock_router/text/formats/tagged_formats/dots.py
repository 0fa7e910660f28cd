"""dots: blocks of calls as tags, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.request import Tool
from penstock_router.text.formats.base import ToolParser
from penstock_router.text.formats.reading.json_calls import JsonCallParser
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.formats.reading.tagged_calls import TaggedCallParser, TaggedFormat
from penstock_router.text.formats.reading.tags import Tags
from penstock_router.text.marks import NO_MARKS, Marks


@dataclass(frozen=True, kw_only=True)
class DotsFormat(TaggedFormat):
    """Tags are the constrained form; JSON is read too."""

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _DotsParser((self.tags,), tools, marks)


class _DotsParser(TaggedCallParser, JsonCallParser):
    def _block_without_tags(self) -> Reading[None]:
        if (yield from self._space()) not in "{[":
            raise Misfit
        while (yield from self._object_or_list()):
            if (yield from self._space()) not in "{[":
                yield from self._ended()
                return


DOTS = DotsFormat(
    name="dots",
    tags=Tags(
        wrap=("<dots_function_call>", "</dots_function_call>"),
        is_one_block=True,
        function=('<invoke name="', '">', "</invoke>"),
        argument=('<parameter name="', '">', "</parameter>"),
    ),
    signs=("<dots_function_call>",),
)
