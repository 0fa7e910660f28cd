"""Reads JSON between marks: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.

A family defines its marks. Either each tool call has marks, or all calls are one list.
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
    name: str
    # The marks; `end` is "" if the family writes none.
    begin: str
    end: str
    other_begins: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    # `padding` is the whitespace inside the marks, `between` the text between tool calls.
    padding: str = ""
    between: str = "\n"
    # True if all tool calls are one list between marks. `listed` has the texts before, between and
    # after the calls.
    is_list: bool = False
    listed: tuple[str, str, str] = ("[", ", ", "]")
    name_key: str = "name"
    arguments_key: str = "arguments"
    # A template of the family has all `signs` (by default `begin`), and no `strange` text.
    signs: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return *self.begins(), *self.ends

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.end, *self.other_ends)))

    def begins(self) -> tuple[str, ...]:
        return self.begin, *self.other_begins

    def is_of(self, template: str) -> bool:
        has_signs = all(sign in template for sign in self.signs or (self.begin,))
        return has_signs and not any(text in template for text in self.strange)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return MarkedJsonParser(self, tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
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
        return call_tag(
            tool,
            f'{before}{{"{self.name_key}": ',
            f', "{self.arguments_key}": ',
            f"}}{behind}",
            rule,
        )


class MarkedJsonParser(JsonCallParser):
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
