"""Expresses minProperties and maxProperties by cases of which listed names are present."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from penstock_shard.structured_output.json_schema.combine import (
    Place,
    Schema,
    any_of,
    unless,
    without,
)
from penstock_shard.structured_output.refusal import ConstraintRefused

# The most cases of a keyword.
_MOST_CASES = 256


def least_properties(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """Require listed names: an output may write an unlisted name twice, unless names are
    watched.
    """
    least, (optional, needed, is_closed) = int(schema["minProperties"]), _members(schema)
    missing = least - needed
    if missing <= 0:
        return True
    chosen = _few("minProperties", least, optional, itertools.combinations(optional, missing))
    cases: list[Schema] = [{"required": names} for names in chosen]
    if (missing == 1 or place.is_watched) and not is_closed:
        cases.append({**without(optional), "minProperties": least})
    elif not optional and not is_closed:
        raise ConstraintRefused(
            f"minProperties: {least} of unknown names cannot be held: one might be written twice"
        )
    return unless("object", any_of(cases))


def most_properties(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """Choose which listed names may be present; unlisted names may fill the rest of the count."""
    most, (optional, needed, is_closed) = int(schema["maxProperties"]), _members(schema)
    if is_closed and len(optional) + needed <= most:
        return True
    if most < needed:
        return unless("object", False)
    if not optional or most == 0:
        return unless("object", {"maxProperties": most})
    counts = range(min(most - needed, len(optional)) + 1)
    sets = (some for count in counts for some in itertools.combinations(optional, count))
    rest = {} if is_closed else {"maxProperties": most}
    cases = [
        {**without([name for name in optional if name not in kept]), "required": kept, **rest}
        for kept in _few("maxProperties", most, optional, sets)
    ]
    return unless("object", any_of(cases))


def _members(schema: dict[str, Any]) -> tuple[list[str], int, bool]:
    """Return optional listed names, the number of required names, and true if other names are
    forbidden.
    """
    required = set(schema.get("required", ()))
    optional = [name for name in schema.get("properties", {}) if name not in required]
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return optional, len(required), is_closed


def _few(
    keyword: str, count: int, names: list[str], sets: Iterable[tuple[str, ...]]
) -> list[list[str]]:
    found = list(map(list, itertools.islice(sets, _MOST_CASES + 1)))
    if len(found) > _MOST_CASES:
        raise ConstraintRefused(f"{keyword}: {count} of {len(names)} names are too many cases")
    return found
