"""Expresses `contains` by cases: each case says which of the first items meet its schema."""

from __future__ import annotations

import itertools
from typing import Any

from penstock_shard.structured_output.json_schema.combine import Place, Schema, any_of, unless
from penstock_shard.structured_output.json_schema.values import same
from penstock_shard.structured_output.refusal import ConstraintRefused

# Items that meet the schema must be among the first 6.
_WITHIN = 6


def contains(place: Place, schema: dict[str, Any], base: str) -> Schema:
    least = int(schema.get("minContains", 1))
    most = int(schema["maxContains"]) if "maxContains" in schema else None
    if least == 0 and most is None:
        return True
    if (
        most is None
        and same(schema["contains"], schema.get("items"))
        and "prefixItems" not in schema
    ):
        # All items meet `contains`.
        return unless("array", {"minItems": least})
    met = place.positive(schema["contains"], base)
    unmet = True if most is None else place.negative(schema["contains"], base)
    greatest = least if most is None else min(most, least + _WITHIN)
    if least > _WITHIN:
        raise ConstraintRefused(f"minContains: {least} is over {_WITHIN}")
    cases = [
        _placed(positions, met, unmet)
        for count in range(least, greatest + 1)
        for positions in itertools.combinations(range(_WITHIN), count)
    ]
    return unless("array", any_of(cases))


def _placed(positions: tuple[int, ...], met: Schema, unmet: Schema) -> Schema:
    """Arrays whose items meet `met` at these positions, and `unmet` at all others."""
    length = positions[-1] + 1 if positions else 0
    prefix = [met if index in positions else unmet for index in range(length)]
    if any(item is False for item in prefix):
        return False
    out: dict[str, Any] = {"type": "array", "minItems": length, "items": unmet}
    return {**out, "prefixItems": prefix} if prefix else out
