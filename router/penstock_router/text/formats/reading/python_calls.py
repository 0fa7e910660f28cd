"""Calls written as in Python, `f(a=1, b="x")`: shared by the families that write them so.

Values are shown as JSON while they come. A call shows as soon as its first value has begun; what
the model left open of it is closed if the model wrote the mark of its end.
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
# A string between single quotes.
_QUOTED = r"'([^'\\\x00-\x1f]|\\[\\'\"nrtbf/]|\\u[0-9a-fA-F]{4})*'"
# White space behind a bracket that is looked through for what follows it.
_MAX_SPACE = 32
# How Llama 3.1 calls what is built in.
BUILTIN = ".call"


def is_identifier(name: str) -> bool:
    """Tell whether Python allows an argument of this name."""
    return _IDENTIFIER.fullmatch(name) is not None and name != "" and not name[0].isdigit()


def call_tags(
    tools: Sequence[Tool],
    rule: CallRule,
    notation: Notation | None = None,
) -> list[JsonObject]:
    """A call of each tool; values are JSON where no notation is given."""
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
    """Values as Python shows them, but objects as JSON."""

    separator = ", "

    def written(self, value: Any) -> str:
        """A value in Python."""
        if isinstance(value, list):
            return f"[{', '.join(map(self.written, value))}]"
        if isinstance(value, Mapping):
            return json.dumps(value, ensure_ascii=False)
        return quoted(value) if isinstance(value, str) else repr(value)

    def text(self, tool: Tool, argument: Argument) -> JsonObject:
        """A string between single quotes, or one of JSON where the schema says more of it."""
        if argument.schema.keys() & {"pattern", "format", "minLength", "maxLength"}:
            return json_format({**argument.schema, "type": "string"})
        return regex(_QUOTED)


def quoted(text: str) -> str:
    """A string between single quotes."""
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return "'" + escaped.replace('\\"', '"').replace("'", "\\'") + "'"


class PythonCallParser(LiteralParser, JsonCallParser):
    """Reads calls, and lists of them; between marks also calls that are JSON."""

    # What may stand behind a function's name and makes a call of it, whether known or not.
    _suffix = ""

    def _marked_calls(self) -> Reading[None]:
        """Match all calls behind a mark, in brackets or not, in Python or JSON, and their end
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
        """The first character behind the bracket that comes next; nothing is consumed."""
        while True:
            behind = self._text[self._at + 1 :]
            if rest := behind.lstrip(SPACE):
                return rest[0]
            if len(behind) > _MAX_SPACE:
                return ""
            yield from self._more()

    def _call_list(self) -> Reading[None]:
        """Calls between square brackets, with commas between them."""
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
        """Calls without brackets around them, on lines of their own or with commas between them."""
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
        """Arguments up to the closing bracket, which is consumed; a comma may follow the last."""
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
        """`key=value`. The value's beginning shows the key, and the first one shows the call."""
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
        """Behind a call without brackets around it: another one, a line's end, or the end mark."""
        follows = rest.lstrip(SPACE)
        if self._closers[0] == "]" or not self._ends or "\n" in rest[: len(rest) - len(follows)]:
            return True
        if not follows:
            return None
        if follows[0] in ",;" or CALL_BEGUN.match(follows):
            return True
        return None if re.fullmatch(r"[\w.\-]+", follows) else self._at_end(follows)


class MarkedPythonParser(PythonCallParser):
    """Reads calls between two marks of the format's own.

    A mark of the end that is a token and has no calls before it is dropped, and so is all that was
    between the marks if the model repeats it with the mark of its end.
    """

    def __init__(
        self, begin: str, end: str, tools: Sequence[Tool], marks: Marks = NO_MARKS
    ) -> None:
        super().__init__(tools, marks)
        self._begin_mark, self._ends = begin, (end,)
        self._strays = tuple(mark for mark in self._ends if marks.spelled(mark) != mark)
        # What came since the begin mark, while calls are read.
        self._seen: list[str] | None = None

    def feed(self, text: str) -> list[Piece]:
        """The pieces that can be shown now."""
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
        """Drop the calls' text, if it comes once more; else what comes of it is content."""
        calls = "".join(self._seen or ())
        calls = calls[: len(calls) - len(self._text) + self._at].rstrip(SPACE)
        self._seen = None
        # Their end marks were consumed with them.
        at = 0
        while at < len(calls):
            if (yield from self._peek()) != calls[at]:
                if at:
                    raise Misfit
                return
            self._take(self._at + 1)
            at += 1
        yield from self._after_call()
