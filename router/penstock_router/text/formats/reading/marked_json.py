"""JSON between marks: `<tool_call>{"name": .., "arguments": {..}}</tool_call>` and its likes.

A family says its marks, and whether each call has marks of its own or all calls are one list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import (
    CallFormat,
    CallRule,
    NamedArguments,
    ToolParser,
)
from penstock_router.text.formats.reading.json_calls import JsonCallParser, call_tag
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import (
    among_text,
    literal,
    one_or_more,
    sequence,
    tag,
)


@dataclass(frozen=True, kw_only=True)
class MarkedJson(CallFormat):
    """Objects, or a list of them, between two marks."""

    name: str
    # The marks; `end` is "" where the family writes none.
    begin: str
    end: str
    # Marks that models of the family are known to write besides.
    other_begins: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    # The white space that the family writes inside of the marks, and what it writes between calls.
    padding: str = ""
    between: str = "\n"
    # Whether all calls stand in one list, between one pair of marks; and what is written before,
    # between and behind them there.
    is_list: bool = False
    listed: tuple[str, str, str] = ("[", ", ", "]")
    # The names of a call's members.
    name_key: str = "name"
    arguments_key: str = "arguments"
    # Texts that a template of the family has, and texts that it has not.
    signs: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        """The begin marks and the end marks."""
        return *self.begins(), *self.ends

    @property
    def ends(self) -> tuple[str, ...]:
        """The end marks."""
        return tuple(filter(None, (self.end, *self.other_ends)))

    def begins(self) -> tuple[str, ...]:
        """The begin marks."""
        return self.begin, *self.other_begins

    def is_of(self, template: str) -> bool:
        """The template has all signs, which are the begin mark if none are given, and no strange
        texts.
        """
        has_signs = all(sign in template for sign in self.signs or (self.begin,))
        return has_signs and not any(text in template for text in self.strange)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        """A parser for one answer."""
        return MarkedJsonParser(self, tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        """Match each call between marks of its own, or all in one list between marks."""
        opens, closes = f"{self.begin}{self.padding}", f"{self.padding}{self.end}"
        before, behind = ("", "") if self.is_list else (opens, closes)
        tags = [self.call(tool, before, behind, rule) for tool in tools]
        if self.is_list:
            first, between, last = self.listed
            opens, closes = f"{opens}{first}", f"{last}{closes}"
            listed = one_or_more(tags, between, parallel=rule.parallel)
            if rule.required:
                return sequence(literal(opens), listed, literal(closes))
            return among_text([tag(opens, listed, closes)], self.begin, parallel=False)
        if rule.required:
            return one_or_more(tags, self.between, parallel=rule.parallel)
        return among_text(tags, self.begin, parallel=rule.parallel)

    def calls_in_words(self, calls: Sequence[NamedArguments]) -> str:
        """Calls between marks of their own, or all in one list between marks."""
        opens, closes = f"{self.begin}{self.padding}", f"{self.padding}{self.end}"
        shown = [
            f'{{"{self.name_key}": {json.dumps(name, ensure_ascii=False)}, '
            f'"{self.arguments_key}": {arguments}}}'
            for name, arguments in calls
        ]
        if self.is_list:
            first, between, last = self.listed
            return f"{opens}{first}{between.join(shown)}{last}{closes}"
        return self.between.join([f"{opens}{each}{closes}" for each in shown])

    def call(self, tool: Tool, before: str, behind: str, rule: CallRule) -> JsonObject:
        """A call, between two texts."""
        return call_tag(
            tool,
            f'{before}{{"{self.name_key}": ',
            f', "{self.arguments_key}": ',
            f"}}{behind}",
            rule,
        )


class MarkedJsonParser(JsonCallParser):
    """Reads what stands between the marks."""

    def __init__(self, family: MarkedJson, tools: Sequence[Tool], marks: Marks) -> None:
        super().__init__(tools, marks)
        self._begins = family.begins()
        self._ends = family.ends

    def _read(self) -> Reading[None]:
        if (yield from self._begin(*self._begins)) not in "{[":
            raise Misfit
        # Some models write several objects between one pair of marks.
        while (yield from self._object_or_list()):
            yield from self._brackets_too_many("{", *self._begins)
            if (yield from self._space()) not in "{[":
                yield from self._ended()
                return
