"""Negates a schema: returns a schema of the values that it forbids, or of fewer if necessary.

Fewer are safe: the final schema then allows fewer texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from penstock_shard.structured_output.json_schema.combine import (
    Place,
    Schema,
    all_of,
    any_of,
    at,
    other_types,
    without,
)
from penstock_shard.structured_output.json_schema.references import REFERENCES
from penstock_shard.structured_output.json_schema.values import type_of
from penstock_shard.structured_output.patterns.automaton import all_texts_but
from penstock_shard.structured_output.patterns.rust import any_text_but, rust_pattern

# An item that breaks `items` must be among the first 5.
_FIRST_ITEMS = 5
_LARGEST_EXACT = 2**53


def negative(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """Values that break at least one keyword."""
    parts = [
        _OPPOSITES[keyword](place, keyword, schema, base)
        for keyword in schema
        if keyword in _OPPOSITES
    ]
    return any_of(parts)


def _type(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return other_types(*("number" if name == "integer" else name for name in named))


def _constants(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    by_type: dict[str, list[Any]] = {}
    for value in [schema["const"]] if keyword == "const" else schema["enum"]:
        by_type.setdefault(type_of(value), []).append(value)
    parts = [other_types(*by_type)]
    for kind, values in by_type.items():
        if kind in _BUT:
            parts.append(_BUT[kind](values))
        else:
            negatives = [negative(place, _described(value), base) for value in values]
            parts.append(all_of([{"type": kind}, *negatives]))
    return any_of(parts)


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        return {"prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    members = {name: {"const": member} for name, member in value.items()}
    return {"properties": members, "required": list(value), "additionalProperties": False}


def _no_number_of(values: list[Any]) -> Schema:
    points = sorted(set(values))
    if max(map(abs, points)) > _LARGEST_EXACT:
        return False
    parts: list[Schema] = [{"type": "number", "exclusiveMaximum": points[0]}]
    for low, high in itertools.pairwise(points):
        parts.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    return any_of([*parts, {"type": "number", "exclusiveMinimum": points[-1]}])


_BUT: dict[str, Callable[[list[Any]], Schema]] = {
    "null": lambda values: False,
    "boolean": lambda values: any_of({"const": one} for one in (False, True) if one not in values),
    "number": _no_number_of,
    "string": lambda values: {"type": "string", "pattern": any_text_but(values)},
}


def _pattern(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    """Texts in which a pattern is not found; none if the pattern is too complex."""
    try:
        return {"type": "string", "pattern": rust_pattern(all_texts_but(schema["pattern"]))}
    except ValueError:
        return False


def _beyond(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    kind, opposite, step = _BOUNDS[keyword]
    if step is None:
        return place.positive({"type": kind, opposite: schema[keyword]}, base)
    limit = int(schema[keyword]) + step
    return limit >= 0 and place.positive({"type": kind, opposite: limit}, base)


# (type of the values, opposite keyword, step to the next count or None).
_BOUNDS: dict[str, tuple[str, str, int | None]] = {
    "minimum": ("number", "exclusiveMaximum", None),
    "maximum": ("number", "exclusiveMinimum", None),
    "exclusiveMinimum": ("number", "maximum", None),
    "exclusiveMaximum": ("number", "minimum", None),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
}


def _more_properties(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    # Members with unspecified names cannot be required: two may have the same name.
    if schema["maxProperties"] != 0:
        return False
    return {"type": "object", "minProperties": 1}


def _required(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    return any_of({"type": "object", **without([name])} for name in schema["required"])


def _properties(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    negatives = {name: place.negative(of, base) for name, of in schema["properties"].items()}
    return any_of(
        {"type": "object", "properties": {name: forbidden}, "required": [name]}
        for name, forbidden in negatives.items()
        if forbidden is not False
    )


def _additional(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    """Objects with a member not in `properties`, if the schema forbids all unlisted members."""
    if schema["additionalProperties"] is not False or schema.get("patternProperties"):
        return False
    return {"type": "object", **without(list(schema.get("properties", ()))), "minProperties": 1}


def _items(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    first = len(schema.get("prefixItems", ()))
    forbidden = place.negative(schema["items"], base)
    return any_of(at(index, forbidden) for index in range(first, first + _FIRST_ITEMS))


def _prefix(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    return any_of(
        at(index, place.negative(of, base)) for index, of in enumerate(schema["prefixItems"])
    )


def _contains(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    if schema.get("minContains", 1) == 0:
        return False
    return {"type": "array", "items": place.negative(schema["contains"], base)}


def _all(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    return any_of(place.negative(part, base) for part in schema["allOf"])


def _any(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    return all_of(place.negative(part, base) for part in schema["anyOf"])


def _one(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    parts = schema["oneOf"]
    none = all_of(place.negative(part, base) for part in parts)
    if len(parts) > 8:
        return none
    allowed = [place.positive(part, base) for part in parts]
    return any_of([none, *(all_of(pair) for pair in itertools.combinations(allowed, 2))])


def _not(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    return place.positive(schema["not"], base)


def _if(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    parts: list[Schema] = []
    for condition, then, otherwise in schema["if"]:
        parts.append(all_of([place.positive(condition, base), place.negative(then, base)]))
        parts.append(all_of([place.negative(condition, base), place.negative(otherwise, base)]))
    return any_of(parts)


def _reference(place: Place, keyword: str, schema: dict[str, Any], base: str) -> Schema:
    target, target_base = place.resolve(keyword, schema[keyword], base)
    return place.negative(target, target_base)


_Opposite = Callable[[Place, str, dict[str, Any], str], Schema]
# Other keywords' opposites cannot be expressed: they count as forbidding nothing.
_OPPOSITES: dict[str, _Opposite] = {
    "type": _type,
    "const": _constants,
    "enum": _constants,
    "pattern": _pattern,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional,
    "items": _items,
    "prefixItems": _prefix,
    "contains": _contains,
    "maxProperties": _more_properties,
    "allOf": _all,
    "anyOf": _any,
    "oneOf": _one,
    "not": _not,
    "if": _if,
    **dict.fromkeys(REFERENCES, _reference),
    **dict.fromkeys(_BOUNDS, _beyond),
}
