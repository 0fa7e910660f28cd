"""Rewrites unevaluatedProperties and unevaluatedItems by cases.

A case says which alternatives a value meets, and which names and items these evaluate. In each
case, ordinary keywords close the rest. Leaving out cases is safe: fewer texts are allowed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock_shard.structured_output.json_schema.combine import (
    Place,
    Schema,
    all_of,
    any_of,
    unless,
)
from penstock_shard.structured_output.json_schema.keywords.one_of import apart
from penstock_shard.structured_output.json_schema.references import REFERENCES
from penstock_shard.structured_output.patterns.rust import rust_pattern
from penstock_shard.structured_output.refusal import ConstraintRefused

UNEVALUATED = frozenset(("unevaluatedProperties", "unevaluatedItems"))
# In `members`, this stands for all members that no keyword lists.
_ALL_MEMBERS = ("additionalProperties", "")
_MOST_CASES = 256
_DEEPEST = 20
# Up to 3 alternatives have all subsets as cases; more have only each single one and the whole set.
_SETS_OF = 3


@dataclass(frozen=True, slots=True)
class _Case:
    """Values that all `parts` allow. The parts evaluate `members`, each a keyword with a name or
    pattern, and the first `items`.
    """

    parts: tuple[Schema, ...] = ()
    members: frozenset[tuple[str, str]] = frozenset()
    items: float = 0

    def and_(self, other: _Case) -> _Case:
        return _Case(
            self.parts + other.parts,
            self.members | other.members,
            max(self.items, other.items),
        )


_Cases = list[_Case]


def closed(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """Rewrite the schema in keywords that do not depend on what others evaluated."""
    return any_of(all_of(case.parts) for case in _cases(place, schema, base, 0))


def _cases(place: Place, schema: Schema, base: str, depth: int) -> _Cases:
    schema, base = place.read(schema, base)
    if isinstance(schema, bool):
        return [_Case()] if schema else []
    if depth > _DEEPEST:
        raise ConstraintRefused("unevaluatedProperties: references go in a circle or too deep")
    found = [_own(place, schema, base)]
    for keyword in schema:
        if keyword in _APPLIED:
            found = _both(found, _APPLIED[keyword](place, keyword, schema, base, depth + 1))
    return [_closed(place, schema, base, case) for case in found]


def _own(place: Place, schema: dict[str, Any], base: str) -> _Case:
    plain = {keyword: schema[keyword] for keyword in schema if keyword not in _NOT_OWN}
    patterns = map(rust_pattern, schema.get("patternProperties", ()))
    members = {
        *(("properties", name) for name in schema.get("properties", ())),
        *(("patternProperties", pattern) for pattern in patterns),
        *({_ALL_MEMBERS} if "additionalProperties" in schema else ()),
    }
    items = math.inf if "items" in schema else len(schema.get("prefixItems", ()))
    return _Case((place.positive(plain, base),), frozenset(members), items)


def _closed(place: Place, schema: dict[str, Any], base: str, case: _Case) -> _Case:
    if "unevaluatedProperties" in schema:
        if _ALL_MEMBERS not in case.members:
            rest = place.positive(schema["unevaluatedProperties"], base)
            case = case.and_(_Case((unless("object", _named(case, rest)),)))
        case = case.and_(_Case(members=frozenset([_ALL_MEMBERS])))
    if "unevaluatedItems" in schema:
        if case.items < math.inf:
            rest = place.positive(schema["unevaluatedItems"], base)
            first = {"prefixItems": [True] * int(case.items)} if case.items else {}
            case = case.and_(_Case((unless("array", {**first, "items": rest}),)))
        case = case.and_(_Case(items=math.inf))
    return case


def _named(case: _Case, rest: Schema) -> dict[str, Any]:
    out: dict[str, Any] = {"additionalProperties": rest}
    for keyword, name in sorted(case.members):
        out.setdefault(keyword, {})[name] = True
    return out


def _both(some: _Cases, others: _Cases) -> _Cases:
    if len(some) * len(others) > _MOST_CASES:
        raise ConstraintRefused(f"unevaluatedProperties: over {_MOST_CASES} cases")
    return [case.and_(other) for case in some for other in others]


def _every(place: Place, parts: Iterable[Schema], base: str, depth: int) -> _Cases:
    found = [_Case()]
    for part in parts:
        found = _both(found, _cases(place, part, base, depth))
    return found


def _all(place: Place, keyword: str, schema: dict[str, Any], base: str, depth: int) -> _Cases:
    return _every(place, schema["allOf"], base, depth)


def _any(place: Place, keyword: str, schema: dict[str, Any], base: str, depth: int) -> _Cases:
    parts = schema["anyOf"]
    sizes = range(1, len(parts) + 1) if len(parts) <= _SETS_OF else (1, len(parts))
    # Larger sets evaluate more names but demand more of a value: keep the smallest and the largest.
    return [
        case
        for size in sizes
        for some in itertools.combinations(parts, size)
        for case in _every(place, some, base, depth)
    ]


def _one(place: Place, keyword: str, schema: dict[str, Any], base: str, depth: int) -> _Cases:
    found = []
    for part, more in zip(schema["oneOf"], apart(place, schema, base), strict=True):
        found += _both(_cases(place, part, base, depth), [_Case(tuple(more))])
    return found


def _if(place: Place, keyword: str, schema: dict[str, Any], base: str, depth: int) -> _Cases:
    found = [_Case()]
    for condition, then, otherwise in schema["if"]:
        if not any(map(_may_evaluate, (condition, then, otherwise))):
            whole = {"if": condition, "then": then, "else": otherwise}
            found = _both(found, [_Case((place.positive(whole, base),))])
            continue
        met = _every(place, [condition, then], base, depth)
        unmet = [_Case((place.negative(condition, base),))]
        found = _both(found, met + _both(unmet, _cases(place, otherwise, base, depth)))
    return found


def _may_evaluate(schema: Schema) -> bool:
    return not isinstance(schema, bool) and not schema.keys() <= {"type", "required"}


def _reference(place: Place, keyword: str, schema: dict[str, Any], base: str, depth: int) -> _Cases:
    target, target_base = place.resolve(keyword, schema[keyword], base)
    return _cases(place, target, target_base, depth)


_APPLIED = {
    "allOf": _all,
    "anyOf": _any,
    "oneOf": _one,
    "if": _if,
    **dict.fromkeys(REFERENCES, _reference),
}
# Keywords handled here, and the schema's URI, which is part of `base`.
_NOT_OWN = UNEVALUATED | _APPLIED.keys() | {"$id", "id"}
