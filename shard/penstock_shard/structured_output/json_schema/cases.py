"""Combines alternatives that apply together, and keeps only the possible combinations.

For `allOf`, llguidance combines every alternative of one part with every alternative of the others.
Contradictory combinations are left out here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock_common.json_schema.keywords import with_subschemas
from penstock_shard.structured_output.json_schema.combine import TYPES, Schema, all_of, any_of
from penstock_shard.structured_output.json_schema.values import same, stated_values, type_of

_MOST_CASES = 128
# The most references followed to find what a part requires.
_MOST_REFERENCES = 32


@dataclass(frozen=True, slots=True)
class _Case:
    """Parts that apply together, and facts about their values: the `types`, the properties that
    objects must have (`required`) or must not have (`absent`), and the properties' `listed` values.
    """

    parts: tuple[Schema, ...] = ()
    types: frozenset[str] = frozenset(TYPES)
    required: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    listed: dict[str, frozenset[tuple[str, object]]] = field(default_factory=dict)

    def with_part(self, part: Schema, definitions: dict[str, Schema]) -> _Case | None:
        """Add a part; None if no value meets all parts."""
        if any(each is False for each in _parts(part)):
            return None
        types, required, absent, listed = self.types, self.required, self.absent, dict(self.listed)
        for plain in _plain(part, definitions, set()):
            types &= _types(plain)
            required |= set(plain.get("required", ()))
            for name, of in plain.get("properties", {}).items():
                values = _listed(of)
                if of is False:
                    absent |= {name}
                elif values is not None:
                    listed[name] = listed.get(name, values) & values
        gone = absent | {name for name, values in listed.items() if not values}
        if required & gone:
            types -= {"object"}
        if not types:
            return None
        return _Case((*self.parts, part), types, required, absent, listed)


def possible_cases(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """A schema of the same values, in which no part of `allOf` contradicts another."""
    if not isinstance(schema, dict):
        return schema
    out = with_subschemas(schema, lambda part: possible_cases(part, definitions))
    if out.keys() != {"allOf"}:
        return out
    base, choices = _decided(_Case(), list(map(_alternatives, _parts(out))), definitions)
    if base is None:
        return False
    cases = _combined(base, choices, definitions) if len(choices) > 1 else None
    if cases is not None:
        return any_of(all_of(_merged(case, definitions)) for case in cases)
    return all_of([*_merged(base, definitions), *map(any_of, choices)])


def _decided(
    base: _Case, choices: list[list[Schema]], definitions: dict[str, Schema]
) -> tuple[_Case | None, list[list[Schema]]]:
    """Parts that always apply, and the choices left between possible alternatives."""
    open_choices = choices
    while decided := [choice for choice in open_choices if len(choice) < 2]:
        for choice in decided:
            found = base.with_part(choice[0], definitions) if choice else None
            if found is None:
                return None, []
            base = found
        left = [choice for choice in open_choices if len(choice) > 1]
        open_choices = [
            [part for part in choice if base.with_part(part, definitions) is not None]
            for choice in left
        ]
    return base, open_choices


def _combined(
    base: _Case, choices: list[list[Schema]], definitions: dict[str, Schema]
) -> list[_Case] | None:
    """The possible combinations; None if there are too many."""
    cases = [base]
    for choice in sorted(choices, key=len):
        found = (case.with_part(part, definitions) for case in cases for part in choice)
        possible = (case for case in found if case is not None)
        cases = list(itertools.islice(possible, _MOST_CASES + 1))
        if len(cases) > _MOST_CASES:
            return None
    return cases


def _merged(case: _Case, definitions: dict[str, Schema]) -> list[Schema]:
    """The parts of a case. Those that only describe properties are merged."""
    seen: set[str] = set()
    parts = [each for part in case.parts for each in _inlined(part, definitions, seen)]
    if case.types == {"object"}:
        # All values are objects, so stating the type changes nothing.
        parts = [{**part, "type": "object"} if _is_plain(part) else part for part in parts]
    for types in ("object", None):
        alike = [part for part in parts if _is_plain(part) and part.get("type") == types]
        open_ones = [part for part in alike if not part.keys() - _OF_PROPERTIES]
        closed = [part for part in alike if part.keys() - _OF_PROPERTIES]
        if len(alike) > 1 and not any("patternProperties" in part for part in closed[:1]):
            into = _with_properties(closed[0] if closed else {}, open_ones)
            into |= {"type": types} if types else {}
            merged = [id(part) for part in (*closed[:1], *open_ones)]
            parts = [into, *(part for part in parts if id(part) not in merged)]
    return parts


def _with_properties(into: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    properties, required = dict(into.get("properties", {})), list(into.get("required", []))
    for part in parts:
        for name, of in part.get("properties", {}).items():
            before = properties.get(name, into.get("additionalProperties", True))
            properties[name] = before if same(before, of) else all_of([before, of])
        required += part.get("required", [])
    out = {**into, **({"properties": properties} if properties else {})}
    return out | ({"required": list(dict.fromkeys(required))} if required else {})


_OF_PROPERTIES = {"type", "properties", "required"}
_OF_OBJECTS = {*_OF_PROPERTIES, "additionalProperties", "patternProperties"}


def _inlined(
    schema: Schema, definitions: dict[str, Schema], seen: set[str]
) -> Iterator[dict[str, Any]]:
    """Parts of a schema. Definitions that only describe objects replace their references. Skips
    references in `seen`.
    """
    for part in filter(_is_schema, _parts(schema)):
        if part.get("$ref") in seen:
            continue
        name = part.get("$ref", "").removeprefix("#/$defs/")
        parts = list(_parts(definitions.get(name, False)))
        if len(seen) < _MOST_REFERENCES and all(map(_is_told_by_objects, parts)):
            seen.add(part["$ref"])
            for each in parts:
                yield from _inlined(each, definitions, seen)
        else:
            yield part


def _is_told_by_objects(schema: Schema) -> bool:
    return _is_plain(schema) or (isinstance(schema, dict) and "$ref" in schema)


def _is_plain(schema: Schema) -> bool:
    return isinstance(schema, dict) and not schema.keys() - _OF_OBJECTS


def _parts(schema: Schema) -> Iterator[Schema]:
    """Yield the parts of nested `allOf`s."""
    if isinstance(schema, dict) and schema.keys() == {"allOf"}:
        for part in schema["allOf"]:
            yield from _parts(part)
    else:
        yield schema


def _alternatives(schema: Schema) -> list[Schema]:
    if isinstance(schema, dict) and schema.keys() == {"anyOf"}:
        return [each for part in schema["anyOf"] for each in _alternatives(part)]
    return [schema]


def _plain(
    schema: Schema, definitions: dict[str, Schema], seen: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield the parts without alternatives. `seen`: references followed so far."""
    for part in filter(_is_schema, _parts(schema)):
        if "$ref" in part and part["$ref"] not in seen and len(seen) < _MOST_REFERENCES:
            seen.add(part["$ref"])
            target = definitions.get(part["$ref"].removeprefix("#/$defs/"), True)
            yield from _plain(target, definitions, seen)
        yield part


def _is_schema(part: Schema) -> bool:
    return isinstance(part, dict)


def _types(schema: dict[str, Any]) -> frozenset[str]:
    named = schema.get("type", TYPES)
    named = [named] if isinstance(named, str) else named
    types = {"number" if name == "integer" else name for name in named}
    values = stated_values(schema)
    return frozenset(types if values is None else types & set(map(type_of, values)))


def _listed(schema: Schema) -> frozenset[tuple[str, object]] | None:
    """Return the listed values with their types; None if there are none, or one is an array or
    object.
    """
    values = stated_values(schema) if isinstance(schema, dict) else None
    if values is None or any(isinstance(value, list | dict) for value in values):
        return None
    return frozenset((type_of(value), value) for value in values)
