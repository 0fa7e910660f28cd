"""Refuses sets that need more items than their schema has different values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from penstock_shard.structured_output.distinct.distinct import MOST_ITEMS
from penstock_shard.structured_output.json_schema.combine import Place, Schema
from penstock_shard.structured_output.json_schema.values import listed_values
from penstock_shard.structured_output.refusal import ConstraintRefused

_DEEPEST = 8


def check_enough(place: Place, schema: dict[str, Any], base: str) -> None:
    """Refuse a set if its required items may run out of different values."""
    least = int(schema.get("minItems", 0))
    if least > MOST_ITEMS:
        raise ConstraintRefused(f"uniqueItems: minItems of {least} is over {MOST_ITEMS}")
    first, rest = schema.get("prefixItems", [])[:least], schema.get("items", True)
    items = [*first, *([rest] * (least - len(first)))]
    kinds = {id(each): set(listed_values(place, each, base)) for each in items}
    listed = [kinds[id(each)] for each in items]
    # Of items with equal schemas, the last must differ from the most others.
    for index in {*range(len(first)), least - 1} - {-1}:
        own = listed[index]
        rivals = sum(not own or not own.isdisjoint(each) for each in listed[:index])
        if _count(place, items[index], base, 0) <= rivals:
            raise ConstraintRefused(
                f"uniqueItems: no value is valid, or may be none: item {index + 1} has "
                f"too few values to differ from {rivals} others"
            )


def _count(place: Place, schema: Schema, base: str, depth: int) -> float:
    """An upper bound of how many values a schema allows."""
    schema, base = place.read(schema, base)
    if isinstance(schema, bool) or depth > _DEEPEST:
        return 0 if schema is False else math.inf
    return min(_counts(place, schema, base, depth + 1), default=math.inf)


def _counts(place: Place, schema: dict[str, Any], base: str, depth: int) -> Iterator[float]:
    if "$ref" in schema:
        yield _count(place, *place.resolve("$ref", schema["$ref"], base), depth)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            yield sum(_count(place, part, base, depth) for part in schema[keyword])
    yield from (_count(place, part, base, depth) for part in schema.get("allOf", ()))
    if "const" in schema:
        yield 1
    elif "enum" in schema:
        # As JSON, because True equals 1 in Python.
        yield len({json.dumps(value, sort_keys=True) for value in schema["enum"]})
    elif "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        yield sum(_of_type(place, kind, schema, base, depth) for kind in types)


def _of_type(place: Place, kind: str, schema: dict[str, Any], base: str, depth: int) -> float:
    if kind in ("null", "boolean"):
        return 1 if kind == "null" else 2
    if kind == "integer" and "minimum" in schema:
        most: float = schema.get("maximum", math.inf)
        least: float = schema["minimum"]
        return max(0.0, most - least + 1)
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if kind == "object" and is_closed:
        return math.prod(
            _count(place, of, base, depth) + (name not in schema.get("required", ()))
            for name, of in schema.get("properties", {}).items()
        )
    return math.inf
