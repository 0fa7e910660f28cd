"""Values that schemas list."""

from __future__ import annotations

from typing import Any

from penstock_shard.structured_output.json_schema.combine import Place, Schema


def type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def target_of(place: Place, schema: Schema, base: str) -> Schema:
    """The schema that a reference means; any other is itself."""
    if isinstance(schema, dict) and "$ref" in schema:
        return place.resolve("$ref", schema["$ref"], base)[0]
    return schema


def listed_values(place: Place, schema: Schema, base: str) -> dict[tuple[str, Any], Any]:
    """By type and value, all that a schema allows; empty if it does not list plain values."""
    schema = target_of(place, schema, base)
    if not isinstance(schema, dict):
        return {}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None and schema.get("type") == "boolean":
        values = [False, True]
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return {}
    return {(type_of(value), value): value for value in values}
