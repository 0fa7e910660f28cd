"""The negation of a schema, as a schema of what it forbids, or of less where that is inexpressible.

Less is safe: the final schema then allows fewer texts.
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
    type_of,
    without,
)
from penstock_shard.structured_output.json_schema.patterns import any_text_but
from penstock_shard.structured_output.refusal import ConstraintRefused

# To break `items`, one of this many first items must break its schema.
_FIRST_ITEMS = 5


def negative(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """Values that break at least one of the keywords."""
    return any_of(
        _OPPOSITES[keyword](place, schema, base) for keyword in schema if keyword in _OPPOSITES
    )


def _type(place: Place, schema: dict[str, Any], base: str) -> Schema:
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return other_types(*("number" if name == "integer" else name for name in named))


def _const(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return _none_of([schema["const"]])


def _enum(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return _none_of(schema["enum"])


def _none_of(values: list[Any]) -> Schema:
    """Any value but these."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(type_of(value), []).append(value)
    parts = [other_types(*by_type)]
    for name, some in by_type.items():
        parts.append(_BUT[name](some))
    return any_of(parts)


def _no_text_of(values: list[Any]) -> Schema:
    return {"type": "string", "pattern": any_text_but(values)}


def _no_number_of(values: list[Any]) -> Schema:
    points = sorted(set(values))
    parts: list[Schema] = [{"type": "number", "exclusiveMaximum": points[0]}]
    for low, high in itertools.pairwise(points):
        parts.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    return any_of([*parts, {"type": "number", "exclusiveMinimum": points[-1]}])


def _no_boolean_of(values: list[Any]) -> Schema:
    return any_of({"const": value} for value in (False, True) if value not in values)


def _no_array_of(values: list[Any]) -> Schema:
    return all_of(_not_array(value) for value in values)


def _not_array(items: list[Any]) -> Schema:
    longer = {"type": "array", "minItems": len(items) + 1}
    shorter = {"type": "array", "maxItems": len(items) - 1} if items else False
    return any_of(
        [longer, shorter, *(at(index, _none_of([item])) for index, item in enumerate(items))]
    )


def _no_object_of(values: list[Any]) -> Schema:
    return all_of(_not_object(value) for value in values)


def _not_object(members: dict[str, Any]) -> Schema:
    known = dict.fromkeys(members, False)
    more = {"type": "object", "properties": known, "minProperties": 1}
    return any_of(
        [
            {"type": "object", "minProperties": 1} if not members else more,
            *({"type": "object", **without([name])} for name in members),
            *(_with(name, _none_of([value])) for name, value in members.items()),
        ]
    )


def _with(name: str, schema: Schema) -> Schema:
    """Objects that have a member `name` which meets `schema`."""
    if schema is False:
        return False
    return {"type": "object", "properties": {name: schema}, "required": [name]}


_BUT: dict[str, Callable[[list[Any]], Schema]] = {
    "null": lambda values: False,
    "boolean": _no_boolean_of,
    "number": _no_number_of,
    "string": _no_text_of,
    "array": _no_array_of,
    "object": _no_object_of,
}


def _bound(kind: str, opposite: str, step: int) -> _Opposite:
    """Values beyond the bound; `step` is how far the next count is, 0 for numbers."""

    def beyond(place: Place, schema: dict[str, Any], base: str) -> Schema:
        keyword = _OF_OPPOSITE[kind, opposite]
        limit = schema[keyword]
        if isinstance(limit, bool):
            raise ConstraintRefused(f"{keyword}: {limit!r} is no number")
        if keyword in ("minimum", "maximum") and schema.get(_EXCLUSIVE[keyword]) is True:
            return False
        if step:
            limit = int(limit) + step
        if limit < 0 and step:
            return False
        return place.positive({"type": kind, opposite: limit}, base)

    return beyond


_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
_OF_OPPOSITE = {
    ("number", "exclusiveMaximum"): "minimum",
    ("number", "exclusiveMinimum"): "maximum",
    ("number", "maximum"): "exclusiveMinimum",
    ("number", "minimum"): "exclusiveMaximum",
    ("string", "maxLength"): "minLength",
    ("string", "minLength"): "maxLength",
    ("array", "maxItems"): "minItems",
    ("array", "minItems"): "maxItems",
    ("object", "maxProperties"): "minProperties",
}


def _more_properties(place: Place, schema: dict[str, Any], base: str) -> Schema:
    # Two or more members of any names cannot be required: they may have the same name.
    if schema["maxProperties"] != 0:
        return False
    return {"type": "object", "minProperties": 1}


def _required(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return any_of({"type": "object", **without([name])} for name in schema["required"])


def _properties(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return any_of(
        _with(name, place.negative(of, base)) for name, of in schema["properties"].items()
    )


def _additional(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """Objects with a member not in `properties`, if the schema forbids all such members."""
    if schema["additionalProperties"] is not False or schema.get("patternProperties"):
        return False
    named = list(schema.get("properties", {}))
    return {"type": "object", **(without(named) if named else {}), "minProperties": 1}


def _items(place: Place, schema: dict[str, Any], base: str) -> Schema:
    items = schema["items"]
    if isinstance(items, list):
        return any_of(at(index, place.negative(of, base)) for index, of in enumerate(items))
    first = len(schema.get("prefixItems", ()))
    forbidden = place.negative(items, base)
    return any_of(at(index, forbidden) for index in range(first, first + _FIRST_ITEMS))


def _prefix(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return any_of(
        at(index, place.negative(of, base)) for index, of in enumerate(schema["prefixItems"])
    )


def _contains(place: Place, schema: dict[str, Any], base: str) -> Schema:
    if schema.get("minContains", 1) == 0:
        return False
    forbidden = place.negative(schema["contains"], base)
    if forbidden is False:
        return {"type": "array", "maxItems": 0}
    return {"type": "array", "items": forbidden} if forbidden is not True else {"type": "array"}


def _all(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return any_of(place.negative(part, base) for part in schema["allOf"])


def _any(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return all_of(place.negative(part, base) for part in schema["anyOf"])


def _one(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """Values that meet none of the alternatives, or two of them."""
    parts = schema["oneOf"]
    if len(parts) > 8:
        return all_of(place.negative(part, base) for part in parts)
    allowed = [place.positive(part, base) for part in parts]
    pairs = [
        all_of([one, other]) for index, one in enumerate(allowed) for other in allowed[index + 1 :]
    ]
    return any_of([all_of(place.negative(part, base) for part in parts), *pairs])


def _not(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return place.positive(schema["not"], base)


def _if(place: Place, schema: dict[str, Any], base: str) -> Schema:
    condition = schema["if"]
    met = [place.positive(condition, base), place.negative(schema.get("then", True), base)]
    unmet = [place.negative(condition, base), place.negative(schema.get("else", True), base)]
    return any_of([all_of(met), all_of(unmet)])


def _dependent_names(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return any_of(
        {"type": "object", "required": [name], **without([needed])}
        for name, some in schema["dependentRequired"].items()
        for needed in some
        if needed != name
    )


def _dependent_schemas(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return any_of(
        all_of([{"type": "object", "required": [name]}, place.negative(of, base)])
        for name, of in schema["dependentSchemas"].items()
    )


def _reference(keyword: str) -> _Opposite:
    def opposite(place: Place, schema: dict[str, Any], base: str) -> Schema:
        target, target_base = place.resolve(keyword, schema[keyword], base)
        return place.negative(target, target_base)

    return opposite


_Opposite = Callable[[Place, dict[str, Any], str], Schema]
# A keyword that is not here has no expressible opposite: it is treated as forbidding nothing.
_OPPOSITES: dict[str, _Opposite] = {
    "type": _type,
    "const": _const,
    "enum": _enum,
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
    "dependentRequired": _dependent_names,
    "dependentSchemas": _dependent_schemas,
    "$ref": _reference("$ref"),
    "$dynamicRef": _reference("$dynamicRef"),
    **{
        keyword: _bound(
            kind, opposite, 0 if kind == "number" else (-1 if keyword.startswith("min") else 1)
        )
        for (kind, opposite), keyword in _OF_OPPOSITE.items()
    },
}
