"""Reads objects with bare keys, `{key:<|"|>text<|"|>,n:42,o:{a:[1]}}`, and constrains them.

A string is between two equal marks, without escapes. The reader is lenient: strings may have JSON
or Python quotes, keys may have quotes or marks, `=` may replace the colon, and a mark belongs to
its string unless a part of the object follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.reading.named_arguments import (
    Argument,
    Part,
    arguments_of,
    text_format,
    with_commas,
)
from penstock_router.text.formats.reading.native_values import Notation
from penstock_router.text.formats.reading.python_literals import LiteralParser
from penstock_router.text.formats.reading.reader import Misfit, Reading, one_of
from penstock_router.text.marks import NO_MARKS, Marks, plain
from penstock_router.text.stop_strings import beginning
from penstock_router.text.structural_tag_builder import tag

_KEY = re.compile(r"[\w.$\-]*")
_SEPARATORS = ":="


class BareKeyParser(LiteralParser):
    """Reads tool calls whose arguments have bare keys."""

    _separators = _SEPARATORS

    def __init__(self, quote: str, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> None:
        super().__init__(tools, marks)
        self._quote = quote
        spelled = re.escape(marks.spelled(quote))
        self._key_begun = re.compile(rf"[\w.$\-]+\s*[:=]|[\"']|{spelled}")
        self._element_begun = re.compile(
            rf"[\"'\[({{+\-.0-9]|{spelled}|None|True|[Ff]alse|null|true"
        )

    def _element_pattern(self, opener: str) -> re.Pattern[str]:
        return self._key_begun if opener == "{" else self._element_begun

    def _may_begin_element(self, rest: str, open_: int) -> bool:
        is_key = self._elements_begin[open_ - 1] is self._key_begun
        is_quote = self._marks.spelled(self._quote).startswith(rest)
        if is_key:
            return is_quote or re.fullmatch(r"[\w.$\-]+\s*", rest) is not None
        return is_quote or super()._may_begin_element(rest, open_)

    def _key(self) -> Reading[None]:
        if (yield from self._peek()) in "\"'" or (yield from self._ahead(self._quote)):
            yield from self._scalar(is_key=True)
            return
        key = yield from self._run(_KEY)
        if not key:
            raise Misfit
        # A bare key is shown with the beginning of its value.
        self._before += json.dumps(key, ensure_ascii=False)
        self._missing = ": null"

    def _bare_object(self) -> Reading[None]:
        """Read a tool call's arguments in brackets. The call is shown with its first value."""
        yield from self._expect("{")
        self._closers, self._elements_begin = [], []
        self._enter("}", self._key_begun)
        self._before = "{"
        yield from self._shown_if_cut(self._elements("{", 1))
        self._before = ""
        self._take(self._at + 1)

    def _scalar(self, *, is_key: bool) -> Reading[None]:
        if (yield from self._any_of(self._quote)) is None:
            yield from super()._scalar(is_key=is_key)
            return
        self._start()
        self._arguments('"')
        self._missing = '": null' if is_key else '"'
        spelled = self._marks.spelled(self._quote)
        ends = tuple(map(self._marks.spelled, self._ends))
        while True:
            yield from self._plain_text((spelled, *ends))
            if (yield from self._is_over_behind(*self._ends)):
                raise Misfit
            if not self._text.startswith(spelled, self._at):
                # This text only looks like the call's end.
                self._say_raw(self._at + 1)
            elif (yield from self._is_last(spelled, is_key=is_key)):
                break
            elif spelled == self._quote:
                self._say_raw(self._at + len(spelled))
            else:
                # The mark is a token, so a quote is meant.
                self._say('"')
                self._at += len(spelled)
        self._at += len(spelled)
        self._drop()
        self._arguments('"')
        self._missing = ": null" if is_key else ""

    def _plain_text(self, marks: tuple[str, ...]) -> Reading[None]:
        pattern = one_of(marks)
        while True:
            found = pattern.search(self._text, self._at)
            end = beginning(self._text, marks, self._at) if found is None else found.start()
            self._say_raw(end)
            if found is not None:
                return
            if self._over and not self._was_cut:
                # If the model ended its answer here, the beginning of a mark is text. If the answer
                # was cut off, its meaning is unknown.
                self._say_raw(len(self._text))
            elif self._over:
                self._at = len(self._text)
            yield from self._more()

    def _say_raw(self, end: int) -> None:
        """Show the text up to `end` as part of a string."""
        text, self._at = plain(self._text[self._at : end]), end
        self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])


@dataclass(frozen=True)
class BareKeyNotation(Notation):
    """Objects with bare keys and no whitespace, and a mark around strings."""

    quote: str

    separator = ","

    def written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self.written, value))}]"
        if isinstance(value, Mapping):
            members = [f"{key}:{self.written(each)}" for key, each in value.items()]
            return "{" + ",".join(members) + "}"
        return json.dumps(value)

    def text(self, tool: Tool, argument: Argument) -> JsonObject:
        return tag(self.quote, text_format(tool, argument), self.quote)

    def key(self, name: str) -> str | None:
        return f"{name}:" if name and _KEY.fullmatch(name) else None

    def arguments(self, tool: Tool, rule: CallRule) -> JsonObject:
        """Match a tool call's arguments between their brackets, in the schema's order."""
        arguments = arguments_of(tool, required=True, is_name=lambda name: bool(self.key(name)))
        parts = [
            Part(each.is_needed, f"{each.name}:", self.value(tool, each, rule))
            for each in arguments
        ]
        return with_commas(parts, self.separator)
