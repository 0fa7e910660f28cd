"""Finds recursive schemas that only infinite values would meet.

For these, llguidance generates without end, or stops in the middle.
"""

from __future__ import annotations

from typing import Any

from penstock_shard.structured_output.json_schema.combine import Schema
from penstock_shard.structured_output.json_schema.values import stated_values, type_of


def ending_names(definitions: dict[str, Schema]) -> set[str]:
    ending: set[str] = set()
    before = -1
    while before < len(ending):
        before = len(ending)
        # A definition comes after those that refer to it: the reverse order takes fewer rounds.
        for name in reversed(definitions):
            if name not in ending and may_end(definitions[name], ending):
                ending.add(name)
    return ending


def may_end(schema: Schema, ending: set[str]) -> bool:
    """True if the schema has a finite value. `ending`: definitions known to have one."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in ending:
        return False
    if not all(may_end(part, ending) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(may_end(part, ending) for part in schema["anyOf"]):
        return False
    return any(_kind_may_end(kind, schema, ending) for kind in _types(schema))


def _types(schema: dict[str, Any]) -> list[str]:
    """Types that a schema allows; "string" stands for all scalar types."""
    values = stated_values(schema)
    if values is not None:
        return [type_of(value) for value in values]
    named = schema.get("type", ["object", "array", "string"])
    return named if isinstance(named, list) else [named]


def _kind_may_end(kind: str, schema: dict[str, Any], ending: set[str]) -> bool:
    if kind == "object":
        return all(may_end(_property(name, schema), ending) for name in schema.get("required", ()))
    if kind == "array":
        prefix, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        needed = prefix[:least] if least <= len(prefix) else [*prefix, schema.get("items", True)]
        return all(may_end(item, ending) for item in needed)
    return True


def _property(name: str, schema: dict[str, Any]) -> Schema:
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)
