"""Expresses oneOf as anyOf, with additions to each alternative that exclude the others.

Most alternatives exclude each other by type, by listed values, by a property with different listed
values in each (a tag), or by properties that only one of them requires. Only the rest need
negations, which cost time and memory for each pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from penstock_shard.structured_output.json_schema.combine import (
    TYPES,
    Place,
    Schema,
    all_of,
    any_of,
    other_types,
    unless,
    without,
)
from penstock_shard.structured_output.json_schema.references import REFERENCES
from penstock_shard.structured_output.json_schema.values import (
    listed_values,
    stated_values,
    type_of,
)
from penstock_shard.structured_output.patterns.reader import may_match
from penstock_shard.structured_output.refusal import ConstraintRefused

# The most alternatives that only negations separate.
_MOST_ALIKE = 64
# The most alternatives: each pair is compared.
_MOST_ALTERNATIVES = 1000
# The depth of references and alternatives followed to find what a schema allows.
_DEEPEST = 6
_Listed = frozenset[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about a schema's values. Values with these facts may still break the schema.

    `types`: the values' types. `listed`: all values, if the schema lists them. `tags`: the listed
    values of objects' properties. `required`: properties that objects must have. `known`:
    properties that the schema mentions. `named` and `patterns`: the only properties that objects
    may have, unless `named` is None.
    """

    types: frozenset[str] = frozenset(TYPES)
    listed: _Listed | None = None
    tags: dict[str, _Listed] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    named: frozenset[str] | None = None
    patterns: frozenset[str] = frozenset()

    def forbids(self, name: str) -> bool:
        if self.named is None or name in self.named:
            return False
        return not any(may_match(pattern, name) for pattern in self.patterns)

    def and_(self, other: _Facts) -> _Facts:
        shared = self.tags.keys() & other.tags
        of = other if self.named is None else self
        named = of.named
        if named is not None and other.named is not None and not other.patterns:
            named &= other.named
        return _Facts(
            self.types & other.types,
            _both(self.listed, other.listed),
            self.tags | other.tags | {name: self.tags[name] & other.tags[name] for name in shared},
            self.required | other.required,
            self.known | other.known,
            named,
            of.patterns,
        )

    def or_(self, other: _Facts) -> _Facts:
        """Facts about values that either schema allows."""
        listed = _either(self.listed, other.listed)
        types = self.types | other.types
        objects = [one for one in (self, other) if "object" in one.types]
        if len(objects) < 2:
            return replace(objects[0] if objects else self, types=types, listed=listed)
        shared = self.tags.keys() & other.tags
        return _Facts(
            types,
            listed,
            {name: self.tags[name] | other.tags[name] for name in shared},
            self.required & other.required,
            self.known | other.known,
            _either(self.named, other.named),
            self.patterns | other.patterns,
        )


def _both(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _either(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    return None if one is None or other is None else one | other


_NOTHING = _Facts(types=frozenset(), listed=frozenset())


def one_of(place: Place, schema: dict[str, Any], base: str) -> Schema:
    beside = apart(place, schema, base)
    return any_of(
        # Add nothing without need: a recursive reference must stand alone.
        all_of([place.positive(part, base), *more])
        for part, more in zip(schema["oneOf"], beside, strict=True)
    )


def apart(place: Place, schema: dict[str, Any], base: str) -> list[list[Schema]]:
    """Schemas to add to each alternative of `oneOf`, so that a value meets only one."""
    if len(schema["oneOf"]) > _MOST_ALTERNATIVES:
        raise ConstraintRefused(f"oneOf: more than {_MOST_ALTERNATIVES} alternatives")
    parts, own = schema["oneOf"], _own_facts(place, schema, base)
    facts = [_facts(place, part, base, 0).and_(own) for part in parts]
    beside = [_Beside() for _ in parts]
    for one, other in itertools.combinations(range(len(parts)), 2):
        _hold_apart((one, facts[one], beside[one]), (other, facts[other], beside[other]))
    alike = {other for each in beside for other in each.alike}
    if len(alike) > _MOST_ALIKE:
        raise ConstraintRefused(
            f"oneOf: more than {_MOST_ALIKE} alternatives that neither a type nor a property "
            "tells apart"
        )
    negatives = {index: place.negative(parts[index], base) for index in sorted(alike)}
    return [[*each.schemas(), *(negatives[other] for other in each.alike)] for each in beside]


@dataclass(slots=True)
class _Beside:
    """Additions to an alternative: properties that objects must or must not have, excluded types,
    and alternatives to negate.
    """

    needed: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    types_out: set[str] = field(default_factory=set)
    alike: list[int] = field(default_factory=list)

    def schemas(self) -> Iterator[Schema]:
        if self.types_out:
            yield other_types(*sorted(self.types_out))
        if self.needed:
            yield unless("object", {"required": sorted(self.needed)})
        if self.absent:
            yield unless("object", without(sorted(self.absent)))


_Alternative = tuple[int, _Facts, _Beside]


def _hold_apart(*pair: _Alternative) -> None:
    (_, one, _), (_, other, _) = pair
    shared = one.types & other.types
    if one.listed is not None and other.listed is not None:
        shared &= {kind for kind, _ in one.listed & other.listed}
    # A schema that only describes objects allows all values of other types.
    is_untyped = set(TYPES) in (one.types, other.types)
    is_of_objects = "object" in shared and (shared == {"object"} or is_untyped)
    if not shared or (shared == {"object"} and _exclude(one, other)):
        return
    is_tagged = is_of_objects and _tag(*pair)
    for (_, own, beside), (index, another, _) in (pair, pair[::-1]):
        if is_tagged or (is_of_objects and _avoid(own, another, beside)):
            beside.types_out |= shared - {"object"}
        else:
            beside.alike.append(index)


def _exclude(one: _Facts, other: _Facts) -> bool:
    """True if one requires a property that the other forbids."""
    return any(map(other.forbids, one.required)) or any(map(one.forbids, other.required))


def _tag(*pair: _Alternative) -> bool:
    """Require a property with different listed values. False if there is none."""
    (_, one, _), (_, other, _) = pair
    shared = one.tags.keys() & other.tags
    names = [name for name in shared if one.tags[name].isdisjoint(other.tags[name])]
    if not names:
        return False
    # If both branches require a property, nothing has to be added for it.
    tag = min(names, key=lambda name: (name not in one.required & other.required, name))
    for _, facts, beside in pair:
        beside.needed |= {tag} - facts.required
    return True


def _avoid(one: _Facts, other: _Facts, beside: _Beside) -> bool:
    """Use a property, if possible, to keep all objects of the first schema from meeting the
    second.
    """
    absent = other.required - one.required
    needed = frozenset(filter(other.forbids, one.known))
    # Begin with the cheapest way: forbid a property that the schema does not mention.
    for names, into in (
        (absent - one.known, beside.absent),
        (needed, beside.needed),
        (absent, beside.absent),
    ):
        if names:
            into.add(min(names))
            return True
    return False


def _facts(place: Place, schema: Schema, base: str, depth: int) -> _Facts:
    if isinstance(schema, bool) or depth > _DEEPEST:
        return _NOTHING if schema is False else _Facts()
    schema, inner = place.read(schema, base)
    facts = _own_facts(place, schema, inner)
    for keyword in REFERENCES:
        if keyword in schema:
            target, target_base = place.resolve(keyword, schema[keyword], inner)
            facts = facts.and_(_facts(place, target, target_base, depth + 1))
    for part in schema.get("allOf", ()):
        facts = facts.and_(_facts(place, part, inner, depth + 1))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            facts = facts.and_(_facts_of_any(place, schema[keyword], inner, depth + 1))
    return facts


def _own_facts(place: Place, schema: dict[str, Schema], base: str) -> _Facts:
    """Facts that the schema's own keywords state."""
    named = schema.get("type", list(TYPES))
    types = {"number" if name == "integer" else name for name in _as_list(named)}
    facts = _Facts(types=frozenset(types), required=frozenset(schema.get("required", ())))
    values = stated_values(schema)
    if values is not None:
        types &= {type_of(value) for value in values}
        listed = frozenset(listed_values(place, schema, base)) or None
        facts = replace(facts, types=frozenset(types), listed=listed)
    properties = schema.get("properties", {})
    is_closed = schema.get("additionalProperties") is False
    listing = {name: frozenset(listed_values(place, of, base)) for name, of in properties.items()}
    return replace(
        facts,
        tags={name: listed for name, listed in listing.items() if listed},
        known=frozenset(properties),
        named=frozenset(properties) if is_closed else None,
        patterns=frozenset(schema.get("patternProperties", ())),
    )


def _as_list(value: object) -> list[str]:
    return value if isinstance(value, list) else [str(value)]


def _facts_of_any(place: Place, parts: Iterable[Schema], base: str, depth: int) -> _Facts:
    found = _NOTHING
    for part in parts:
        found = found.or_(_facts(place, part, base, depth))
    return found
