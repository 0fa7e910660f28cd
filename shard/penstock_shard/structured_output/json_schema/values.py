"""Values that schemas list."""

from __future__ import annotations

import json
from typing import Any

from penstock_common.json_schema.keywords import restricting
from penstock_shard.structured_output.json_schema.combine import TYPES, Place, Schema

# The most references followed to a list of values.
_MOST_REFERENCES = 4


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


def same(one: Schema, other: Schema) -> bool:
    """True if two schemas are written alike. `==` takes True for 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def stated_values(schema: dict[str, Any]) -> list[Any] | None:
    """Values in `const` or `enum`; None if there is neither."""
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def target_of(place: Place, schema: Schema, base: str) -> Schema:
    """A reference's schema; any other schema as it is."""
    if isinstance(schema, dict) and "$ref" in schema:
        return place.resolve("$ref", schema["$ref"], base)[0]
    return schema


def listed_values(place: Place, schema: Schema, base: str) -> dict[tuple[str, Any], Any]:
    """The listed values, by type and value; other keywords may forbid some. Empty if the schema
    lists none, or not only plain ones.
    """
    schema = target_of(place, schema, base)
    if not isinstance(schema, dict):
        return {}
    values = stated_values(schema)
    if values is None and schema.get("type") == "boolean" and schema.get("nullable") is not True:
        values = [False, True]
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return {}
    return {(type_of(value), value): value for value in values}


def allowed_values(place: Place, schema: Schema, base: str) -> dict[tuple[str, Any], Any]:
    """Exactly the allowed values, by type and value. Empty if keywords other than `const`, `enum`
    or `type` restrict them.
    """
    for _ in range(_MOST_REFERENCES):
        if isinstance(schema, bool):
            return {}
        schema, base = place.read(schema, base)
        said = restricting(schema)
        if said.keys() != {"$ref"}:
            break
        schema, base = place.resolve("$ref", said["$ref"], base)
    said.pop("nullable", None)
    types = said.get("type", list(TYPES))
    if said.keys() - {"type"} not in ({"const"}, {"enum"}) and said != {"type": "boolean"}:
        return {}
    listed = listed_values(place, said, base)
    return {key: value for key, value in listed.items() if _is_of(value, types)}


def _is_of(value: object, types: str | list[str]) -> bool:
    named = [types] if isinstance(types, str) else types
    is_whole = isinstance(value, int | float) and float(value).is_integer()
    return type_of(value) in named or (
        type_of(value) == "number" and is_whole and "integer" in named
    )
