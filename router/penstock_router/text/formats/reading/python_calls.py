"""Reads tool calls written as in Python, `f(a=1, b="x")`.

Values are shown as JSON while they arrive, and a call once its first value has begun. Unfinished
parts are closed if the model wrote its end mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.reading.json_calls import JsonCallParser, written_as
from penstock_router.text.formats.reading.named_arguments import (
    Argument,
    Part,
    arguments_of,
    with_commas,
)
from penstock_router.text.formats.reading.native_values import Notation
from penstock_router.text.formats.reading.python_literals import (
    ARGUMENT_BEGUN,
    CALL_BEGUN,
    LiteralParser,
    UnreadableWord,
)
from penstock_router.text.formats.reading.reader import SPACE, Misfit, Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import json_format, regex, tag

_IDENTIFIER = re.compile(r"\w*")
_QUOTED = r"'([^'\\\x00-\x1f]|\\[\\'\"nrtbf/]|\\u[0-9a-fA-F]{4})*'"
# Maximum whitespace searched for the character after a bracket.
_MAX_SPACE = 32
# Llama 3.1 adds this to the names of built-in tools.
BUILTIN = ".call"


def is_identifier(name: str) -> bool:
    return _IDENTIFIER.fullmatch(name) is not None and name != "" and not name[0].isdigit()


def call_tags(
    tools: Sequence[Tool],
    rule: CallRule,
    notation: Notation | None = None,
) -> list[JsonObject]:
    """Match a call of each tool; values are JSON if no notation is given."""
    return [
        tag(
            f"{tool.name}(",
            with_commas(
                [
                    Part(each.is_needed, f"{each.name}=", _value_format(tool, each, rule, notation))
                    for each in arguments_of(tool, required=rule.required, is_name=is_identifier)
                ]
            ),
            ")",
        )
        for tool in tools
    ]


def _value_format(tool: Tool, argument: Argument, rule: CallRule, notation: Notation | None) -> Any:
    if notation is None:
        return json_format(written_as(argument.schema, rule))
    return notation.value(tool, argument, rule)


class PythonNotation(Notation):
    """Values as Python writes them, but objects as JSON."""

    separator = ", "

    def written(self, value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(self.written, value))}]"
        if isinstance(value, Mapping):
            return json.dumps(value, ensure_ascii=False)
        return quoted(value) if isinstance(value, str) else repr(value)

    def text(self, tool: Tool, argument: Argument) -> JsonObject:
        """Match a string between single quotes, or JSON if the schema constrains its text."""
        if argument.schema.keys() & {"pattern", "format", "minLength", "maxLength"}:
            return json_format({**argument.schema, "type": "string"})
        return regex(_QUOTED)


def quoted(text: str) -> str:
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return "'" + escaped.replace('\\"', '"').replace("'", "\\'") + "'"


class PythonCallParser(LiteralParser, JsonCallParser):
    """Reads Python calls and lists of calls; between marks also JSON calls."""

    # A suffix that marks a name as a function's, even if the function is unknown.
    _suffix = ""

    def _marked_calls(self) -> Reading[None]:
        """Read all calls after a mark, in Python or JSON, perhaps in brackets, and their end
        marks.
        """
        first = yield from self._space()
        if first == "{" or (first == "[" and (yield from self._behind_bracket()) == "{"):
            yield from self._object_or_list()
        elif first == "[":
            yield from self._call_list()
        else:
            yield from self._call_row()
        yield from self._end_marks()

    def _behind_bracket(self) -> Reading[str]:
        """Return the first character after the next bracket; nothing is consumed."""
        while True:
            behind = self._text[self._at + 1 :]
            if rest := behind.lstrip(SPACE):
                return rest[0]
            if len(behind) > _MAX_SPACE:
                return ""
            yield from self._more()

    def _call_list(self) -> Reading[None]:
        """Read calls between square brackets, with commas between them."""
        self._open_brackets("]", CALL_BEGUN)
        yield from self._expect("[")
        while True:
            yield from self._one_call()
            after = yield from self._space()
            if after in ",]":
                self._take(self._at + 1)
                # A trailing comma is allowed.
                if after == "," and (yield from self._space()) == "]":
                    self._take(self._at + 1)
                    after = "]"
                if after == "]":
                    return
            elif (yield from self._is_end_behind_brackets()):
                return

    def _call_row(self) -> Reading[None]:
        """Read calls without brackets around them, separated by lines or commas."""
        self._open_brackets()
        while True:
            yield from self._one_call()
            self._drop()
            if (yield from self._is_end_behind_brackets()) or not self._ends:
                return
            self._fits = False

    def _open_brackets(self, closer: str = "", pattern: re.Pattern[str] = CALL_BEGUN) -> None:
        self._closers, self._elements_begin = [], []
        if closer:
            self._enter(closer, pattern)

    def _one_call(self) -> Reading[None]:
        yield from self._space()
        self._fits = False
        name = yield from self._callable_name()
        yield from self._expect("(")
        outside = len(self._closers)
        self._announced, self._before, self._missing = name, "", ""
        self._enter(")", ARGUMENT_BEGUN)
        yield from self._mended(self._all_arguments(), outside + 1)
        del self._closers[outside:], self._elements_begin[outside:]

    def _callable_name(self) -> Reading[str]:
        name = yield from self._name()
        if self._suffix and name.endswith(self._suffix) and name not in self._tools:
            name = name.removesuffix(self._suffix)
        elif not self._is_callable(name):
            raise Misfit
        yield from self._space()
        return name

    def _all_arguments(self) -> Reading[None]:
        """Consume arguments and the closing bracket; a trailing comma is allowed."""
        seen: set[str] = set()
        while (yield from self._space()) != ")":
            yield from self._argument(seen)
            after = yield from self._space()
            if after not in ",)":
                raise Misfit
            if after == ",":
                self._take(self._at + 1)
        self._take(self._at + 1)

    def _argument(self, seen: set[str]) -> Reading[None]:
        """Read `key=value`. The key is shown with its value's beginning, and the call with the
        first key.
        """
        key = yield from self._run(_IDENTIFIER)
        if not is_identifier(key) or key in seen:
            raise UnreadableWord if key else Misfit
        yield from self._space()
        if (yield from self._any_of("=")) is None:
            raise UnreadableWord
        self._before = ("{" if not seen else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._missing = "null"
        seen.add(key)
        yield from self._literal()

    def _may_follow(self, rest: str) -> bool | None:
        """Tell whether this text may follow a call without brackets around it: another call, a
        line's end, or the end mark.
        """
        follows = rest.lstrip(SPACE)
        if self._closers[0] == "]" or not self._ends or "\n" in rest[: len(rest) - len(follows)]:
            return True
        if not follows:
            return None
        if follows[0] in ",;" or CALL_BEGUN.match(follows):
            return True
        return None if re.fullmatch(r"[\w.\-]+", follows) else self._at_end(follows)


class MarkedPythonParser(PythonCallParser):
    """Reads tool calls between the format's two marks.

    An end mark that is a token is dropped even without calls before it. If the model repeats the
    calls' text and the end mark, the repetition is dropped too.
    """

    def __init__(
        self, begin: str, end: str, tools: Sequence[Tool], marks: Marks = NO_MARKS
    ) -> None:
        super().__init__(tools, marks)
        self._begin_mark, self._ends = begin, (end,)
        self._strays = tuple(mark for mark in self._ends if marks.spelled(mark) != mark)
        # The text since the begin mark, while calls are read.
        self._seen: list[str] | None = None

    def feed(self, text: str) -> list[Piece]:
        if self._seen is not None:
            self._seen.append(text)
        return super().feed(text)

    def _read(self) -> Reading[None]:
        self._seen = None
        if (yield from self._until(self._begin_mark, *self._strays)) in self._strays:
            self._drop()
            return
        yield from self._again(self._begin_mark)
        self._seen = [self._text[self._at :]]
        yield from self._marked_calls()
        yield from self._repeated()

    def _repeated(self) -> Reading[None]:
        """Drop the calls' text if it is repeated; a repetition that breaks off is content."""
        calls = "".join(self._seen or ())
        calls = calls[: len(calls) - len(self._text) + self._at].rstrip(SPACE)
        self._seen = None
        # `calls` includes the end marks.
        at = 0
        while at < len(calls):
            if (yield from self._peek()) != calls[at]:
                if at:
                    raise Misfit
                return
            self._take(self._at + 1)
            at += 1
        yield from self._after_call()
