"""Reads arguments in pairs of tags: `<arg_key>city</arg_key><arg_value>Oslo</arg_value>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.argument_kinds import Kinds
from penstock_router.request import Tool
from penstock_router.text.formats.base import ToolParser
from penstock_router.text.formats.reading.offered_tools import AwaitedNames
from penstock_router.text.formats.reading.reader import SPACE, Misfit, Reading, TextOver
from penstock_router.text.formats.reading.tagged_calls import TaggedCallParser, TaggedFormat
from penstock_router.text.marks import NO_MARKS, TOKEN, Marks

_TEXT = re.compile(r"[^<>{\n\ud800]*")


@dataclass(frozen=True, kw_only=True)
class KeyedFormat(TaggedFormat):
    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return KeyedCallParser((self.tags, *self.others), tools, marks)


class KeyedCallParser(TaggedCallParser):
    """Tolerates a missing tag before or after a name or before a value, and all arguments as one
    JSON object after the function's name.
    """

    # An argument's name that was read before its turn.
    _early_key: str | None = None

    def _function(self) -> Reading[None]:
        yield from self._again(*self._function_begins)
        start = len(self._held)
        try:
            name = (yield from self._run(_TEXT)).strip(f"{SPACE}\"'")
        except TextOver:
            self._end_by_answer("".join(self._held[start:]).strip(), begun=False)
            raise
        if self._tags.function[1]:
            yield from self._any_of(self._tags.function[1])
        first = yield from self._space()
        if first == ">":
            self._take(self._at + 1)
            first = yield from self._space()
        if first == "{":
            yield from self._json_arguments(name)
            return
        self._early_key = None
        if (yield from self._ahead(self._tags.argument[1])) is not None:
            name, self._early_key = self._split(name)
        yield from self._one_call(name)

    def _json_arguments(self, name: str) -> Reading[None]:
        if not self._is_callable(name):
            raise Misfit
        self._call(name)
        yield from self._json_value()
        yield from self._any_of(*self._ends)
        self._fits = True
        self._end_call()

    def _split(self, text: str) -> tuple[str, str]:
        """Split a function's name from the argument's name after it."""
        found = self._offered.split(text)
        if found is None:
            raise Misfit
        return found

    def _argument(self) -> Reading[tuple[str, Kinds | None] | None]:
        first = yield from self._space()
        if first in f"<{TOKEN}" and self._early_key is None:
            named = yield from super()._argument()
        else:
            name = self._early_key or (yield from self._key_without_tag())
            self._early_key = None
            yield from self._expect(self._tags.argument[1])
            named = name.strip(), None
        if named is not None:
            yield from self._space()
            yield from self._any_of(self._tags.value)
        return named

    def _key_without_tag(self) -> Reading[str]:
        """Read an argument's name that lacks its tag. Text at the answer's end is no name."""
        try:
            return (yield from self._run(_TEXT))
        except TextOver:
            if self._was_cut:
                raise
            raise Misfit from None

    def _names_behind_argument(self) -> AwaitedNames | None:
        return self._awaited
