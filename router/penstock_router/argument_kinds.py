"""Which of JSON's types a schema allows, for formats of calls that write strings without quotes.

There `3` may be a number or a string: only the tool's schema says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Schema = dict[str, Any]
Kinds = frozenset[str]
STRING: Kinds = frozenset({"string"})
NO_STRING: Kinds = frozenset({"object", "array", "number", "integer", "boolean", "null"})
ANY: Kinds = NO_STRING | STRING

_COMBINING = ("anyOf", "oneOf", "allOf")
# Deeper than schemas of arguments nest what they refer to.
_MAX_DEPTH = 16


def kinds_of_argument(parameters: Schema | None, name: str) -> Kinds:
    """JSON's types that the schema allows for an argument: a string, if it says nothing of it."""
    schema = parameters or {}
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, dict) else None
    if found is None:
        found = schema.get("additionalProperties")
    return kinds_of(found, schema) or STRING


def kinds_of(schema: Any, root: Schema, depth: int = 0) -> Kinds:
    """JSON's types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return kinds_of(_referred(schema["$ref"], root), root, depth + 1)
    if "type" in schema:
        given = schema["type"]
        named = given if isinstance(given, list) else [given]
        return frozenset(name for name in named if isinstance(name, str)) & ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset(_kind_of_value(value) for value in values)
    parts = (part for key in _COMBINING for part in _listed(schema.get(key)))
    return frozenset().union(*(kinds_of(part, root, depth + 1) for part in parts))


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _referred(pointer: str, root: Schema) -> Any:
    found: Any = root
    for step in pointer.removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _kind_of_value(value: Any) -> str:
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    )
    return next((kind for each, kind in kinds if isinstance(value, each)), "null")


def outline(schema: Any, root: Schema | None = None, depth: int = 0) -> Schema:
    """A schema of nothing but the types of values by their names: what reading calls needs."""
    root = schema if root is None else root
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return {}
    if isinstance(schema.get("$ref"), str):
        return outline(_referred(schema["$ref"], root), root, depth + 1)
    found: Schema = {}
    if kinds := kinds_of(schema, root):
        found["type"] = sorted(kinds)
    for key in _COMBINING:
        for part in _listed(schema.get(key)):
            found |= {
                name: value
                for name, value in outline(part, root, depth + 1).items()
                if name != "type"
            }
    properties = schema.get("properties")
    if isinstance(properties, dict):
        found["properties"] = {
            name: outline(each, root, depth + 1) for name, each in properties.items()
        }
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found[key] = outline(schema[key], root, depth + 1)
    if isinstance(schema.get("required"), list):
        found["required"] = schema["required"]
    return found
