"""Calls written as in Python, `f(a=1, b="x")`: shared by the families that write them so.

Values are shown as JSON while they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.reading.named_arguments import arguments_of, with_commas
from penstock_router.text.formats.reading.python_literals import LiteralParser
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.structural_tag_builder import json_format, literal, sequence, tag

_IDENTIFIER = re.compile(r"\w*")


def is_identifier(name: str) -> bool:
    """Whether Python allows an argument of this name."""
    return _IDENTIFIER.fullmatch(name) is not None and name != "" and not name[0].isdigit()


def call_tags(tools: Sequence[Tool], *, required: bool) -> list[JsonObject]:
    """A call of each tool; values are JSON, which the reader accepts like Python."""
    return [tag(f"{tool.name}(", _arguments_format(tool, required=required), ")") for tool in tools]


def _arguments_format(tool: Tool, *, required: bool) -> JsonObject:
    arguments = arguments_of(tool, required=required, is_name=is_identifier)
    return with_commas(
        [
            (each.is_needed, sequence(literal(f"{each.name}="), json_format(each.schema)))
            for each in arguments
        ]
    )


class PythonCallParser(LiteralParser):
    """Reads calls, and lists of them."""

    def _call_list(self) -> Reading[None]:
        """Calls between square brackets, with commas between them."""
        yield from self._expect("[")
        while True:
            yield from self._one_call()
            after = yield from self._space()
            if after not in ",]":
                raise Misfit
            self._take(self._at + 1)
            # A trailing comma is allowed.
            if after == "]" or (yield from self._space()) == "]":
                break
        if after == ",":
            self._take(self._at + 1)
        yield from self._after_call()

    def _one_call(self) -> Reading[None]:
        yield from self._space()
        self._fits = False
        name = yield from self._callable_name()
        yield from self._expect("(")
        if (yield from self._space()) == ")":
            self._take(self._at + 1)
            self._call(name, "{}")
            return
        seen: set[str] = set()
        while True:
            yield from self._argument(name, seen)
            after = yield from self._space()
            if after not in ",)":
                raise Misfit
            self._take(self._at + 1)
            if after == "," and (yield from self._space()) == ")":
                self._take(self._at + 1)
                after = ")"
            if after == ")":
                break
        self._arguments("}")
        self._end_call()

    def _callable_name(self) -> Reading[str]:
        name = yield from self._name()
        if not self._is_callable(name):
            raise Misfit
        yield from self._space()
        return name

    def _argument(self, name: str, seen: set[str]) -> Reading[None]:
        """`key=value`. The first one shows the call."""
        key = yield from self._run(_IDENTIFIER)
        if not is_identifier(key) or key in seen:
            raise Misfit
        yield from self._space()
        yield from self._expect("=")
        if seen:
            self._drop()
        else:
            self._call(name)
        self._arguments(("{" if not seen else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        seen.add(key)
        yield from self._literal()
