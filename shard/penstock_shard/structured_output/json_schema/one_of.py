"""oneOf as anyOf: beside each alternative, what keeps the others from being met too.

Most alternatives exclude each other by the type of value, by the values that they list, by a
property of which each lists others (a tag), or by properties that only one of them requires. Only
the rest are held apart by negations, which cost time and memory by the pair.
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
from penstock_shard.structured_output.json_schema.values import listed_values, type_of
from penstock_shard.structured_output.refusal import ConstraintRefused

# Alternatives that only negations hold apart.
_MOST_ALIKE = 64
# References and nested alternatives that are followed to find what a schema allows.
_DEEPEST = 6
_Listed = frozenset[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of the values that a schema allows; it may allow fewer.

    `types` are theirs, `listed` all of them (None: they are not listed), `tags` the values of those
    properties of objects that list theirs, `required` the properties that objects have, `known`
    those that it speaks of, `named` all that they may have (None: any).
    """

    types: frozenset[str] = frozenset(TYPES)
    listed: _Listed | None = None
    tags: dict[str, _Listed] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    named: frozenset[str] | None = None

    def and_(self, other: _Facts) -> _Facts:
        """What is known of the values that both schemas allow."""
        names = self.tags.keys() & other.tags
        shared = {name: self.tags[name] & other.tags[name] for name in names}
        return _Facts(
            self.types & other.types,
            _both(self.listed, other.listed),
            {**self.tags, **other.tags}
            | {name: self.tags[name] & other.tags[name] for name in shared},
            self.required | other.required,
            self.known | other.known,
            _both(self.named, other.named),
        )

    def or_(self, other: _Facts) -> _Facts:
        """What is known of the values that at least one of the schemas allows."""
        objects = [one for one in (self, other) if "object" in one.types]
        if len(objects) < 2:
            of = objects[0] if objects else self
            tags, required, known, named = of.tags, of.required, of.known, of.named
        else:
            shared = self.tags.keys() & other.tags
            tags = {name: self.tags[name] | other.tags[name] for name in shared}
            required = self.required & other.required
            known = self.known | other.known
            named = _either(self.named, other.named)
        listed = _either(self.listed, other.listed)
        return _Facts(self.types | other.types, listed, tags, required, known, named)


def _both(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _either(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    return None if one is None or other is None else one | other


_NOTHING = _Facts(types=frozenset(), listed=frozenset())


def one_of(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """Values that meet exactly one alternative of a schema's `oneOf`."""
    beside = apart(place, schema, base)
    return any_of(
        # Nothing beside it: only a reference by itself may be recursive.
        all_of([place.positive(part, base), *more])
        for part, more in zip(schema["oneOf"], beside, strict=True)
    )


def apart(place: Place, schema: dict[str, Any], base: str) -> list[list[Schema]]:
    """For each alternative of `oneOf`, the schemas that hold beside it where no other is met."""
    parts, own = schema["oneOf"], _own_facts(place, schema, base)
    facts = [_facts(place, part, base, 0).and_(own) for part in parts]
    beside = [_Beside() for _ in parts]
    for one, other in itertools.combinations(range(len(parts)), 2):
        if not _tell_apart((facts[one], beside[one]), (facts[other], beside[other])):
            beside[one].alike.append(other)
            beside[other].alike.append(one)
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
    """What holds beside an alternative: properties that objects must have, or may not, types that
    are left out, and the alternatives that are to be negated.
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


_Alternative = tuple[_Facts, _Beside]


def _tell_apart(one: _Alternative, other: _Alternative) -> bool:
    """Tell whether no value meets both alternatives, or none that meets what is added beside each."""
    shared = one[0].types & other[0].types
    if one[0].listed is not None and other[0].listed is not None:
        shared &= {kind for kind, _ in one[0].listed & other[0].listed}
    if not shared:
        return True
    is_untyped = any(facts.types == set(TYPES) for facts, _ in (one, other))
    if "object" not in shared or not (shared == {"object"} or is_untyped):
        return False
    if not (_tag(one, other) or _exclude(one, other)):
        return False
    # What says nothing of other types than objects is met by each of their values.
    for _, beside in (one, other):
        beside.types_out |= shared - {"object"}
    return True


def _tag(one: _Alternative, other: _Alternative) -> bool:
    """Require a property of which the two list different values, if there is one."""
    tags, others = one[0].tags, other[0].tags
    names = [name for name in tags.keys() & others if tags[name].isdisjoint(others[name])]
    if not names:
        return False
    # One that both require narrows nothing.
    tag = min(names, key=lambda name: (name not in one[0].required & other[0].required, name))
    for facts, beside in (one, other):
        beside.needed |= {tag} - facts.required
    return True


def _exclude(*pair: _Alternative) -> bool:
    """Have each of two alternatives lack what the other requires, or require what it forbids."""
    (one, _), (other, _) = pair
    if _is_outside(one, other) or _is_outside(other, one):
        return True
    ways = [_way_out(one, other), _way_out(other, one)]
    if None in ways:
        return False
    for (_, beside), way in zip(pair, ways, strict=True):
        assert way is not None
        (beside.absent if way[0] == "absent" else beside.needed).add(way[1])
    return True


def _is_outside(one: _Facts, other: _Facts) -> bool:
    """Tell whether objects of the first schema have a property that the second forbids."""
    return other.named is not None and not one.required <= other.named


def _way_out(one: _Facts, other: _Facts) -> tuple[str, str] | None:
    """How objects of the first schema are kept from meeting the second: with which property
    "absent", or "needed".
    """
    absent = other.required - one.required
    # Forbidding a property that the schema does not speak of costs the least.
    cheap = absent - one.known
    needed = one.known - other.named if other.named is not None else frozenset()
    for kind, names in (("absent", cheap), ("needed", needed), ("absent", absent)):
        if names:
            return kind, min(names)
    return None


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
    """What a schema's own keywords tell, not those of its parts."""
    named = schema.get("type", list(TYPES))
    types = {"number" if name == "integer" else name for name in _as_list(named)}
    facts = _Facts(types=frozenset(types), required=frozenset(schema.get("required", ())))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        types &= {type_of(value) for value in values}
        listed = frozenset(listed_values(place, schema, base)) or None
        facts = replace(facts, types=frozenset(types), listed=listed)
    properties = schema.get("properties", {})
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    listing = {name: frozenset(listed_values(place, of, base)) for name, of in properties.items()}
    return replace(
        facts,
        tags={name: listed for name, listed in listing.items() if listed},
        known=frozenset(properties),
        named=frozenset(properties) if is_closed else None,
    )


def _as_list(value: object) -> list[str]:
    return value if isinstance(value, list) else [str(value)]


def _facts_of_any(place: Place, parts: Iterable[Schema], base: str, depth: int) -> _Facts:
    found = _NOTHING
    for part in parts:
        found = found.or_(_facts(place, part, base, depth))
    return found
