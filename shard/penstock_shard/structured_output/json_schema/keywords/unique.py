"""Expresses uniqueItems by a mark, if arrays are watched during generation.

Arrays are not watched where a structural tag leaves open whether JSON begins. There, sets of up to
4 listed values become a list of all their arrays, in any order; other sets are refused.
"""

from __future__ import annotations

import itertools
from typing import Any

from penstock_shard.structured_output.distinct.enough import check_enough
from penstock_shard.structured_output.distinct.watched import UNIQUE
from penstock_shard.structured_output.json_schema.combine import Place, Schema, any_of, unless
from penstock_shard.structured_output.json_schema.values import listed_values
from penstock_shard.structured_output.refusal import ConstraintRefused

# 4 values give 65 arrays; 5 would give 326, and compile in two seconds.
_MOST_VALUES = 4


def unique(place: Place, schema: dict[str, Any], base: str) -> Schema:
    if not schema["uniqueItems"] or schema.get("maxItems") in (0, 1):
        return True
    if place.is_watched:
        check_enough(place, schema, base)
        return UNIQUE
    listed = {} if "prefixItems" in schema else listed_values(place, schema.get("items"), base)
    if not 1 <= len(listed) <= _MOST_VALUES:
        raise ConstraintRefused(
            "uniqueItems: cannot be held while an array is written, but for items of "
            f"an enum of at most {_MOST_VALUES} values"
        )
    values = listed.values()
    return unless(
        "array",
        any_of(
            _array(order)
            for length in range(len(values) + 1)
            for order in itertools.permutations(values, length)
        ),
    )


def _array(values: tuple[Any, ...]) -> Schema:
    size = {"type": "array", "minItems": len(values), "maxItems": len(values)}
    return {**size, "prefixItems": [{"const": value} for value in values]} if values else size
