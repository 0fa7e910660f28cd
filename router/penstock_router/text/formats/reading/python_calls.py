"""Calls written as in Python, `f(a=1, b="x")`: shared by the families that write them so.

Values are shown as JSON while they come. A call shows as soon as its first value has begun; what
the model left open of it is closed if the model wrote the mark of its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import FREE_WRITING, Writing
from penstock_router.text.formats.reading.json_calls import JsonCallParser, written_as
from penstock_router.text.formats.reading.named_arguments import arguments_of, with_commas
from penstock_router.text.formats.reading.python_literals import (
    ARGUMENT_BEGUN,
    CALL_BEGUN,
    LiteralParser,
    UnreadableWord,
)
from penstock_router.text.formats.reading.reader import SPACE, Misfit, Reading, TextOver
from penstock_router.text.structural_tag_builder import json_format, literal, sequence, tag

_IDENTIFIER = re.compile(r"\w*")
_BRACKETS = re.compile(r"[)}\];, \t\r\n]*")
# White space behind a bracket that is looked through for what follows it.
_MAX_SPACE = 32
# How Llama 3.1 calls what is built in.
_BUILTIN = ".call"


def is_identifier(name: str) -> bool:
    """Whether Python allows an argument of this name."""
    return _IDENTIFIER.fullmatch(name) is not None and name != "" and not name[0].isdigit()


def call_tags(
    tools: Sequence[Tool], *, required: bool, writing: Writing = FREE_WRITING
) -> list[JsonObject]:
    """A call of each tool; values are JSON, which the reader accepts like Python."""
    return [
        tag(f"{tool.name}(", _arguments_format(tool, required=required, writing=writing), ")")
        for tool in tools
    ]


def _arguments_format(tool: Tool, *, required: bool, writing: Writing) -> JsonObject:
    arguments = arguments_of(tool, required=required, is_name=is_identifier)
    return with_commas(
        [
            (
                each.is_needed,
                sequence(literal(f"{each.name}="), json_format(written_as(each.schema, writing))),
            )
            for each in arguments
        ]
    )


class PythonCallParser(LiteralParser, JsonCallParser):
    """Reads calls, and lists of them; between marks also calls that are JSON."""

    def _marked_calls(self) -> Reading[None]:
        """All calls behind a mark, in brackets or not, in Python or JSON, and their end marks."""
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

    def _end_marks(self) -> Reading[None]:
        """Drop marks of the end behind calls, and brackets too many before them."""
        self._drop()
        brackets = yield from self._run(_BRACKETS)
        if self._ends and (yield from self._any_of(*self._ends)) is not None:
            yield from self._again(*self._ends)
        elif brackets.strip(SPACE):
            self._give_back()
        yield from self._after_call()

    def _call_list(self) -> Reading[None]:
        """Calls between square brackets, with commas between them."""
        self._open_brackets("]", CALL_BEGUN)
        yield from self._expect("[")
        while True:
            yield from self._one_call()
            after = yield from self._space()
            if after not in ",]":
                if (yield from self._is_end()):
                    return
                raise Misfit
            self._take(self._at + 1)
            if after == "]":
                return
            # A trailing comma is allowed.
            if (yield from self._space()) == "]":
                self._take(self._at + 1)
                return

    def _call_row(self) -> Reading[None]:
        """Calls without brackets around them, on lines of their own or with commas between them."""
        self._open_brackets()
        while True:
            yield from self._one_call()
            self._drop()
            yield from self._run(_BRACKETS)
            if (yield from self._is_end()) or not self._ends:
                return
            self._fits = False

    def _open_brackets(self, closer: str = "", pattern: re.Pattern[str] = CALL_BEGUN) -> None:
        self._closers, self._elements_begin = [], []
        if closer:
            self._enter(closer, pattern)

    def _is_end(self) -> Reading[bool]:
        """Whether a mark of the end comes next."""
        return bool(self._ends) and (yield from self._ahead(*self._ends)) is not None

    def _one_call(self) -> Reading[None]:
        yield from self._space()
        self._fits = False
        name = yield from self._callable_name()
        yield from self._expect("(")
        outside = len(self._closers)
        self._announced, self._before, self._missing = name, "", ""
        self._enter(")", ARGUMENT_BEGUN)
        try:
            yield from self._all_arguments()
        except UnreadableWord:
            raise
        except Misfit:
            if self._announced or not (yield from self._is_end()):
                raise
            self._complete(outside + 1)
        except TextOver:
            if not self._announced and not self._was_cut and self._is_whole(outside + 1):
                self._finish()
            raise
        self._finish()
        del self._closers[outside:], self._elements_begin[outside:]

    def _is_whole(self, num_brackets: int) -> bool:
        """Whether all values that were begun have ended, and nothing of another has come."""
        rest = "".join(self._held) + self._text[self._at :]
        is_closed = not self._missing and len(self._closers) == num_brackets
        return is_closed and not rest.strip(f"{SPACE},")

    def _finish(self) -> None:
        """The call is over."""
        if self._announced:
            self._call(self._announced, "{}")
            self._announced = ""
        else:
            self._arguments("}")
        self._end_call()

    def _callable_name(self) -> Reading[str]:
        name = yield from self._name()
        if name not in self._tools and name.removesuffix(_BUILTIN) in self._tools:
            name = name.removesuffix(_BUILTIN)
        if not self._is_callable(name):
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
