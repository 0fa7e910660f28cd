"""Builds constraints on values in a family's own notation.

Schemas that the notation cannot express are enforced as JSON, which readers accept everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock_router.argument_kinds import ANY, NO_STRING, STRING
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.reading.json_calls import written_as
from penstock_router.text.formats.reading.named_arguments import Argument, Part, with_commas
from penstock_router.text.structural_tag_builder import (
    either,
    json_format,
    literal,
    one_or_more,
    sequence,
    tag,
)

# Deeper schemas are enforced as JSON.
_MAX_DEPTH = 8
# Deeper lists without a schema are JSON.
_MAX_LISTS = 2
# Keywords that constrain nothing, then all keywords of lists and of objects that are written
# element by element.
_NOTES = frozenset({"title", "description", "default", "examples"})
_OF_LISTS = _NOTES | {"type", "items"}
_OF_OBJECTS = _NOTES | {"type", "properties", "required", "additionalProperties"}
_WORDS = (("boolean", True, False), ("null", None))
_ANY_TOOL = Tool("")


class Notation(ABC):
    separator: str

    @abstractmethod
    def written(self, value: Any) -> str:
        """Write a value in the family's notation."""

    @abstractmethod
    def text(self, tool: Tool, argument: Argument) -> JsonObject:
        """Match the strings that an argument may be."""

    def key(self, name: str) -> str | None:
        """Return a member's name and the text after it; None if objects with this member are
        written as JSON.
        """
        return None

    def value(self, tool: Tool, argument: Argument, rule: CallRule, depth: int = 0) -> Any:
        """Match the values that an argument may have. Return a format, or its JSON."""
        schema = argument.schema
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            return either([literal(self.written(each)) for each in values])
        kinds = argument.kinds
        if kinds == frozenset({"array"}) and depth < _MAX_DEPTH and schema.keys() <= _OF_LISTS:
            return self._list(tool, argument, rule, depth)
        if kinds == frozenset({"object"}) and depth < _MAX_DEPTH and self._has_members(schema):
            return self._object(tool, argument, rule, depth)
        ways = schema.get("anyOf")
        if isinstance(ways, list) and ways and schema.keys() <= {"anyOf", *_NOTES}:
            others = [dataclasses.replace(argument, schema=way) for way in ways]
            return either([self.value(tool, other, rule, depth + 1) for other in others])
        if schema.keys() <= {"type", *_NOTES} and tool.text_format is None:
            return _of_any(self, kinds or ANY, rule, depth)
        if "type" in schema or not schema.keys() - _NOTES:
            return either(self._of_kinds(tool, argument, kinds or ANY, rule, depth))
        return json_format(written_as(schema, rule))

    def of_any(self, kinds: frozenset[str], rule: CallRule, depth: int) -> JsonObject:
        argument = Argument("", is_needed=False, schema={"type": sorted(kinds)})
        return either(self._of_kinds(_ANY_TOOL, argument, kinds, rule, depth))

    def _of_kinds(
        self, tool: Tool, argument: Argument, kinds: frozenset[str], rule: CallRule, depth: int
    ) -> list[JsonObject]:
        ways = []
        if kinds & STRING:
            ways.append(self.text(tool, argument))
        words = [value for kind, *values in _WORDS if kind in kinds for value in values]
        ways += [literal(self.written(word)) for word in words]
        rest = set(kinds & NO_STRING) - {kind for kind, *_ in _WORDS}
        if "array" in rest and depth < _MAX_LISTS and not argument.schema.keys() - _OF_LISTS:
            rest.remove("array")
            ways.append(self._list(tool, argument, rule, depth))
        if rest:
            ways.append(json_format(written_as({**argument.schema, "type": sorted(rest)}, rule)))
        return ways

    def _list(self, tool: Tool, argument: Argument, rule: CallRule, depth: int) -> JsonObject:
        items = argument.schema.get("items")
        element = dataclasses.replace(argument, schema=items if isinstance(items, dict) else {})
        each = tag("", self.value(tool, element, rule, depth + 1), "")
        listed = one_or_more([each], self.separator, parallel=True)
        return either([literal("[]"), sequence(literal("["), listed, literal("]"))])

    def _has_members(self, schema: JsonObject) -> bool:
        """Tell whether objects can be written member by member."""
        properties = schema.get("properties")
        is_plain = schema.keys() <= _OF_OBJECTS and isinstance(properties, Mapping)
        return (
            is_plain
            and all(self.key(name) is not None for name in properties or ())
            and set(schema.get("required") or ()) <= set(properties or ())
            and not isinstance(schema.get("additionalProperties"), dict)
        )

    def _object(self, tool: Tool, argument: Argument, rule: CallRule, depth: int) -> JsonObject:
        schema = argument.schema
        needed = set(schema.get("required") or ())
        members = [
            dataclasses.replace(
                argument,
                name=name,
                is_needed=name in needed,
                schema=each if isinstance(each, dict) else {},
            )
            for name, each in schema["properties"].items()
        ]
        parts = [
            Part(
                each.is_needed,
                self.key(each.name) or "",
                self.value(tool, each, rule, depth + 1),
            )
            for each in members
        ]
        listed = with_commas(parts, self.separator)
        return sequence(literal("{"), listed, literal("}"))


@functools.lru_cache(maxsize=256)
def _of_any(notation: Notation, kinds: frozenset[str], rule: CallRule, depth: int) -> msgspec.Raw:
    """Return `Notation.of_any` as JSON, which may be hundreds of times as long as the schema."""
    return msgspec.Raw(msgspec.json.encode(notation.of_any(kinds, rule, depth)))
