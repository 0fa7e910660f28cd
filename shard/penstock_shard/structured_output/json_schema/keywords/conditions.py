"""Expresses `if`, `then` and `else` as alternatives.

A condition has two alternatives, met or not met, so n conditions would have 2^n. Most are
impossible if all conditions test the same property, such as a tag with an object's kind. These
conditions become one alternative for each value of the property.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_common.json_schema.keywords import restricting
from penstock_shard.structured_output.json_schema.combine import (
    Place,
    Schema,
    all_of,
    any_of,
    other_types,
    without,
)
from penstock_shard.structured_output.json_schema.values import allowed_values

_Condition = tuple[Schema, Schema, Schema]


def conditions(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """A schema for the conditions of `schema`, which has the form that `modern` returns."""
    by_name: dict[str, list[_Tagged]] = {}
    others = []
    for condition in schema["if"]:
        tagged = _tagged(place, condition, base)
        if tagged is None:
            others.append(condition)
        else:
            by_name.setdefault(tagged.name, []).append(tagged)
    parts = [_by_value(place, name, tagged, base) for name, tagged in by_name.items()]
    return all_of([*parts, *(_either(place, condition, base) for condition in others)])


def _either(place: Place, condition: _Condition, base: str) -> Schema:
    met, then, otherwise = condition
    if then is True and otherwise is True:
        return True
    return any_of(
        [
            all_of([place.positive(met, base), place.positive(then, base)]),
            all_of([place.negative(met, base), place.positive(otherwise, base)]),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Tagged:
    """A condition on a property: its value is one of `values`."""

    name: str
    values: dict[tuple[str, Any], Any]
    # True if objects without the property meet the condition; below, if values of other types do.
    if_absent: bool
    if_no_object: bool
    # Schemas, in llguidance's keywords, for values that meet the condition; below, for others.
    then: Schema
    otherwise: Schema


def _tagged(place: Place, condition: _Condition, base: str) -> _Tagged | None:
    """Return None if the condition tests anything except one property's values."""
    met, then, otherwise = condition
    met, inner = place.read(met, base)
    if isinstance(met, bool):
        return None
    asked = restricting(met)
    properties = asked.get("properties", {})
    if not asked.keys() <= {"type", "properties", "required"} or len(properties) != 1:
        return None
    [(name, of)] = properties.items()
    values = allowed_values(place, of, inner)
    required, kind = asked.get("required", []), asked.get("type", "object")
    if not values or kind != "object" or required not in ([], [name]):
        return None
    demands = place.positive(then, base), place.positive(otherwise, base)
    return _Tagged(name, values, not required, "type" not in asked, *demands)


def _by_value(place: Place, name: str, tagged: Sequence[_Tagged], base: str) -> Schema:
    """Express conditions on one property as cases: each value, objects without the property, and
    other types.
    """
    alike: dict[tuple[bool, ...], list[Any]] = {}
    for key, value in {key: value for each in tagged for key, value in each.values.items()}.items():
        alike.setdefault(tuple(key in each.values for each in tagged), []).append(value)
    listed = [value for values in alike.values() for value in values]
    unlisted = place.negative({"enum": listed}, base)
    cases = {
        met: [_objects(name, place.positive({"enum": values}, base))]
        for met, values in alike.items()
    }
    others = (
        ((False,) * len(tagged), _objects(name, unlisted)),
        (tuple(one.if_absent for one in tagged), {"type": "object", **without([name])}),
        (tuple(one.if_no_object for one in tagged), other_types("object")),
    )
    for met, case in others:
        cases.setdefault(met, []).append(case)
    # Cases with equal consequences, which may be conditions again, are joined.
    return any_of(all_of([any_of(some), *_demands(tagged, met)]) for met, some in cases.items())


def _objects(name: str, of: Schema) -> Schema:
    if of is False:
        return False
    return {"type": "object", "properties": {name: of}, "required": [name]}


def _demands(tagged: Iterable[_Tagged], met: Iterable[bool]) -> list[Schema]:
    return [one.then if is_met else one.otherwise for one, is_met in zip(tagged, met, strict=True)]
