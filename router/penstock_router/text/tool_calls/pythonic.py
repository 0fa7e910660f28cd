"""Llama 3.2 and 4, Gemma 3: `[f(a=1, b="x"), g()]`, a Python list of calls with named arguments.

The list is the answer, or follows a marker; a list later in the text has no calls. Values are shown
as JSON while they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock_router.errors import BadRequest
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.structural_tag_builder import (
    either,
    json_format,
    literal,
    one_or_more,
    sequence,
    tag,
)
from penstock_router.text.tool_calls.base import Misfit, Reading, ToolParser
from penstock_router.text.tool_calls.json_calls import calls_or_text
from penstock_router.text.tool_calls.python_literals import LiteralParser

_TAG, _BEGIN, _END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_IDENTIFIER = re.compile(r"\w*")
# How templates describe the format.
_DESCRIBED = re.compile(r"\[\w+\(\w+=")
# Top-level keywords of a schema that can be enforced on arguments written one by one, or that
# constrain nothing.
_EXPRESSIBLE = frozenset({"type", "properties", "required", "additionalProperties"}) | {
    *("$defs", "definitions", "$schema", "$id", "$comment"),
    *("title", "description", "default", "examples"),
}
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """The answer is a list of calls."""

    name: str = "pythonic"
    markers: tuple[str, ...] = (_TAG, _BEGIN, _END)

    def is_of(self, template: str) -> bool:
        """The template shows such a list, or the marker of Llama 4."""
        return _BEGIN in template or _DESCRIBED.search(template) is not None

    def parser(self, names: Collection[str]) -> ToolParser:
        """A parser for one answer."""
        return _CallParser(names)

    def calls(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> JsonObject:
        """A list of calls; values are JSON, which the reader accepts like Python."""
        tags = [
            tag(f"{tool.name}(", _arguments_format(tool, required=required), ")") for tool in tools
        ]
        listed = one_or_more(tags, ", ", parallel=parallel)
        calls = sequence(literal("["), listed, literal("]"))
        return calls if required else calls_or_text(calls, "[")


def _arguments_format(tool: Tool, *, required: bool) -> JsonObject:
    """`a=..., b=...` in the order of the schema."""
    schema = (tool.parameters if required or tool.strict else None) or {}
    if tool.strict:
        _check_expressible(tool.name, schema)
    loose = tool.parameters or {}
    properties = _object_of(schema or loose, "properties")
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    needed = set(schema.get("required") or ())
    named = [
        (
            name in needed,
            sequence(literal(f"{name}="), json_format(shared | _schema_of(schema, name))),
        )
        for name in properties
        if _is_identifier(name)
    ]
    return _listed(named)


def _schema_of(schema: JsonObject, name: str) -> JsonObject:
    found = _object_of(schema, "properties").get(name, {})
    return found if isinstance(found, dict) else {}


def _object_of(schema: JsonObject, key: str) -> Mapping[str, object]:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}


def _is_identifier(name: str) -> bool:
    return _IDENTIFIER.fullmatch(name) is not None and name != "" and not name[0].isdigit()


def _check_expressible(name: str, schema: JsonObject) -> None:
    """Refuse a strict schema that cannot be enforced on arguments written one by one."""
    beyond = sorted(schema.keys() - _EXPRESSIBLE)
    if beyond:
        raise BadRequest(
            f"the function {name!r} cannot be strict with {beyond[0]!r} at the top of its "
            "parameters: this model writes its arguments one by one",
            param="tools",
        )
    unwritable = [key for key in _object_of(schema, "properties") if not _is_identifier(key)]
    unwritable += sorted(set(schema.get("required") or ()) - set(schema.get("properties") or ()))
    if unwritable:
        raise BadRequest(
            f"the function {name!r} cannot be strict with the argument {unwritable[0]!r}: this "
            "model writes arguments by names that a schema describes and Python allows",
            param="tools",
        )


def _listed(named: Sequence[tuple[bool, JsonObject]]) -> JsonObject:
    """All required arguments and any of the others, in order, with commas between them."""
    behind = [_behind_another(needed, argument) for needed, argument in named]
    first_needed = next((at for at, (needed, _) in enumerate(named) if needed), None)
    last = len(named) if first_needed is None else first_needed + 1
    # One alternative for each argument that may be the first, which has no comma before it.
    ways = [sequence(named[at][1], *behind[at + 1 :]) for at in range(last)]
    if first_needed is None:
        ways.append(literal(""))
    return either(ways)


def _behind_another(needed: bool, argument: JsonObject) -> JsonObject:
    with_comma = sequence(literal(", "), argument)
    return with_comma if needed else either([with_comma, literal("")])


class _CallParser(LiteralParser):
    _at_beginning = True

    def _read(self) -> Reading[None]:
        begins, self._at_beginning = self._at_beginning, False
        if not begins or (yield from self._space()) != "[":
            yield from self._until(_TAG, _BEGIN)
            yield from self._space()
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
        yield from self._any_of(_END)
        yield from self._after_call()

    def _one_call(self) -> Reading[None]:
        yield from self._space()
        self._fits = False
        name = yield from self._run_name()
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
        self._drop()

    def _run_name(self) -> Reading[str]:
        name = yield from self._name()
        if name not in self._names:
            raise Misfit
        yield from self._space()
        return name

    def _argument(self, name: str, seen: set[str]) -> Reading[None]:
        """`key=value`. The first one shows the call."""
        key = yield from self._run(_IDENTIFIER)
        if not _is_identifier(key) or key in seen:
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
