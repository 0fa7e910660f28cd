"""oneOf as anyOf: each alternative together with the negation of all others.

If a property tells them apart, as in unions with a discriminator, no negation is needed.
"""

from __future__ import annotations

from typing import Any

from penstock_shard.structured_output.json_schema.combine import (
    Place,
    Schema,
    all_of,
    any_of,
    type_of,
)
from penstock_shard.structured_output.refusal import ConstraintRefused

_MOST_ALTERNATIVES = 64


def one_of(place: Place, parts: list[Schema], base: str) -> Schema:
    """Values that meet exactly one alternative."""
    name = _telling_apart(place, parts, base)
    if name is not None:
        return any_of(_with(place, name, part, base) for part in parts)
    if len(parts) > _MOST_ALTERNATIVES:
        raise ConstraintRefused(
            f"oneOf: more than {_MOST_ALTERNATIVES} alternatives that no property tells apart"
        )
    negatives = [place.negative(part, base) for part in parts]
    return any_of(
        all_of([place.positive(part, base), *negatives[:index], *negatives[index + 1 :]])
        for index, part in enumerate(parts)
    )


def _with(place: Place, name: str, part: Schema, base: str) -> Schema:
    """An alternative with the property required, as without it values could not be told apart."""
    schema = _target(place, part, base)
    there = place.positive(part, base)
    if schema.get("type") == "object" and name in schema.get("required", ()):
        # Returned as it is: only a reference by itself may be recursive.
        return there
    return all_of([there, {"type": "object", "required": [name]}])


def _target(place: Place, part: Schema, base: str) -> Schema:
    if isinstance(part, dict) and "$ref" in part:
        return place.resolve("$ref", part["$ref"], base)[0]
    return part


def _telling_apart(place: Place, parts: list[Schema], base: str) -> str | None:
    """A property that all alternatives list values of, no value twice; None if there is none."""
    listed = [_listed(place, part, base) for part in parts]
    for name in listed[0] if len(parts) > 1 else ():
        if all(name in values for values in listed):
            values = [value for some in listed for value in some[name]]
            if len(set(values)) == len(values):
                return name
    return None


def _listed(place: Place, part: Schema, base: str) -> dict[str, set[tuple[str, Any]]]:
    """Properties of an alternative that list their plain values (const, enum), and these."""
    part = _target(place, part, base)
    properties = part.get("properties") if isinstance(part, dict) else None
    out = {}
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        if isinstance(schema, dict) and ("const" in schema or "enum" in schema):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if isinstance(values, list) and not any(isinstance(v, list | dict) for v in values):
                out[name] = {(type_of(value), value) for value in values}
    return out
