"""Rewrites JSON Schema in the keywords that llguidance handles correctly.

The result allows the same texts or fewer, never more. Other keywords are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from penstock_common.json_schema.keywords import OUTDATED, is_unknown, near_miss
from penstock_shard.structured_output.json_schema.cases import possible_cases
from penstock_shard.structured_output.json_schema.combine import (
    Place,
    Schema,
    all_of,
    any_of,
    unless,
)
from penstock_shard.structured_output.json_schema.infinite_values import ending_names, may_end
from penstock_shard.structured_output.json_schema.keyword_types import check_shapes, has_shape
from penstock_shard.structured_output.json_schema.keywords.conditions import conditions
from penstock_shard.structured_output.json_schema.keywords.contains import contains
from penstock_shard.structured_output.json_schema.keywords.formats import FORMATS
from penstock_shard.structured_output.json_schema.keywords.names import (
    property_names,
    simpler_patterns,
)
from penstock_shard.structured_output.json_schema.keywords.negation import negative
from penstock_shard.structured_output.json_schema.keywords.one_of import one_of
from penstock_shard.structured_output.json_schema.keywords.property_counts import (
    least_properties,
    most_properties,
)
from penstock_shard.structured_output.json_schema.keywords.unevaluated import UNEVALUATED, closed
from penstock_shard.structured_output.json_schema.keywords.unique import unique
from penstock_shard.structured_output.json_schema.modern import modern, without_nulls
from penstock_shard.structured_output.json_schema.narrow import narrowed
from penstock_shard.structured_output.json_schema.recursion import apart_from_recursion
from penstock_shard.structured_output.json_schema.references import REFERENCES, Document
from penstock_shard.structured_output.json_schema.values import type_of
from penstock_shard.structured_output.patterns.rust import rust_pattern
from penstock_shard.structured_output.refusal import ConstraintRefused, shown

# Larger integers are not exact in some JSON readers and in llguidance.
_LARGEST_EXACT = 2**53
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\ud800-\udfff]")
_MOST_SCHEMAS = 15_000
_MOST_VALUES = 20_000
_UNENFORCED = ", or none that can be enforced"


def prepared(root: Schema, *, is_watched: bool = False) -> dict[str, Any]:
    """The schema for llguidance, without "x-guidance".

    `is_watched`: generation checks that items and names differ.
    """
    impossible: list[tuple[int, str]] = []
    while True:
        translation = _Translation(root, impossible, is_watched=is_watched)
        found, definitions = _combined(translation.positive(root, ""), translation.definitions)
        if found is False:
            raise ConstraintRefused(f"json_schema: no value is valid{_UNENFORCED}")
        ending = ending_names(definitions)
        if not may_end(found, ending):
            why = ": each would go on without end" if definitions else _UNENFORCED
            raise ConstraintRefused(f"json_schema: no value is valid{why}")
        more = [target for target, name in translation.names.items() if name not in ending]
        if not more:
            break
        impossible += more
    found, definitions = narrowed(*apart_from_recursion(found, definitions))
    if found is True:
        found = {}
    return {**found, "$defs": definitions} if definitions else found


def _combined(found: Schema, definitions: dict[str, Schema]) -> tuple[Schema, dict[str, Schema]]:
    combined = {name: possible_cases(of, definitions) for name, of in definitions.items()}
    return possible_cases(found, combined), combined


class _Translation:
    def __init__(
        self, root: Schema, impossible: Collection[tuple[int, str]], *, is_watched: bool
    ) -> None:
        self._document = Document(root)
        self.resolve = self._document.resolve
        self.is_watched = is_watched
        self._impossible = impossible
        self.definitions: dict[str, Schema] = {}
        # Names of definitions, by the target schema's identity and base URI.
        self.names: dict[tuple[int, str], str] = {}
        self._schemas = 0
        self._negated: list[int] = []

    def positive(self, schema: Schema, base: str) -> Schema:
        read, inner = self.read(schema, base)
        if isinstance(read, bool):
            return read
        if not UNEVALUATED.isdisjoint(read):
            return closed(self, schema, base)
        out: dict[str, Any] = {}
        more: list[Schema] = []
        for keyword, value in read.items():
            if keyword in _KEPT:
                out[keyword] = _KEPT[keyword](self, keyword, value, inner)
            else:
                more += self._added(keyword, read, inner)
        return all_of([out or True, *more])

    def negative(self, schema: Schema, base: str) -> Schema:
        read, inner = self.read(schema, base)
        if isinstance(read, bool):
            return not read
        if id(schema) in self._negated:
            # The schema is recursive: leave out what it forbids here.
            return False
        self._negated.append(id(schema))
        try:
            return negative(self, read, inner)
        finally:
            self._negated.pop()

    def read(self, schema: Schema, base: str) -> tuple[Schema, str]:
        self._schemas += 1
        if self._schemas > _MOST_SCHEMAS:
            raise ConstraintRefused(f"json_schema: comes to more than {_MOST_SCHEMAS} schemas")
        if isinstance(schema, bool):
            return schema, base
        if not isinstance(schema, dict):
            raise ConstraintRefused(f"json_schema: {shown(schema)} is no schema")
        schema = without_nulls(schema)
        check_shapes(schema)
        for keyword, value in schema.items():
            if is_unknown(keyword) or keyword in OUTDATED:
                _check_unknown(keyword, value)
        if "$ref" in schema and self._document.references_stand_alone:
            return {"$ref": schema["$ref"]}, base
        read = simpler_patterns(modern(schema, self._document.draft))
        return read, self._document.base(schema, base)

    def _reference(self, keyword: str, reference: object, base: str) -> Schema:
        target, target_base = self.resolve(keyword, reference, base)
        key = (id(target), target_base)
        if isinstance(target, bool) or key in self._impossible:
            return target is True
        if key not in self.names:
            name = f"s{len(self.names)}"
            self.names[key] = name
            self.definitions[name] = True
            self.definitions[name] = self.positive(target, target_base)
        return {"$ref": f"#/$defs/{self.names[key]}"}

    def _added(self, keyword: str, schema: dict[str, Any], base: str) -> Iterator[Schema]:
        if keyword in _ADDED:
            yield _ADDED[keyword](self, schema, base)
        elif keyword in REFERENCES:
            yield self._reference(keyword, schema[keyword], base)


def _check_unknown(keyword: str, value: Any) -> None:
    if keyword in OUTDATED:
        raise ConstraintRefused(f"json_schema: {keyword} is a keyword of drafts before 4")
    meant = near_miss(keyword)
    # `ref` without # or / is data, not a misspelled `$ref`.
    is_name = meant == "$ref" and not {"#", "/"} & set(str(value))
    if meant and has_shape(meant, value) and not is_name:
        raise ConstraintRefused(f"json_schema: no keyword {shown(keyword)}: is {meant} meant?")


# ---- Keywords that llguidance handles: the values that it gets ---------------------------------


def _same(place: Place, keyword: str, value: Any, base: str) -> Any:
    return value


def _count(place: Place, keyword: str, value: Any, base: str) -> int:
    return int(value)


def _bound(place: Place, keyword: str, value: Any, base: str) -> Any:
    upper = keyword in ("maximum", "exclusiveMaximum")
    if (value if upper else -value) >= _LARGEST_EXACT:
        # Larger integers are not exact: a tighter bound loses nothing.
        return _LARGEST_EXACT if upper else -_LARGEST_EXACT
    _check_number(keyword, value, _LARGEST_EXACT - 1)
    return value


def _constants(place: Place, keyword: str, value: Any, base: str) -> Any:
    if keyword == "enum" and len(value) > _MOST_VALUES:
        raise ConstraintRefused(f"enum: more than {_MOST_VALUES} values")
    for leaf in _leaves(value):
        if isinstance(leaf, str):
            _check_text(keyword, leaf)
        elif type_of(leaf) == "number":
            _check_number(keyword, leaf, _LARGEST_EXACT)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _check_number(keyword: str, number: float, largest: int) -> None:
    if not abs(number) <= largest:
        raise ConstraintRefused(
            f"{keyword}: {shown(number)} is beyond 2^53, where numbers are not exact"
        )


def _check_text(keyword: str, text: str) -> None:
    # JSON writes these only as \u escapes, which outputs may not contain.
    if _UNWRITABLE.search(text):
        raise ConstraintRefused(
            f"{keyword}: {shown(text)} holds a control character or a surrogate"
        )


def _pattern(place: Place, keyword: str, value: Any, base: str) -> str:
    return rust_pattern(value)


def _names(place: Place, keyword: str, value: Any, base: str) -> list[str]:
    for name in value:
        _check_text(keyword, name)
    return list(value)


def _schema(place: Place, keyword: str, value: Any, base: str) -> Schema:
    return place.positive(value, base)


def _schemas(place: Place, keyword: str, value: Any, base: str) -> list[Schema]:
    return [place.positive(part, base) for part in value]


def _by_name(place: Place, keyword: str, value: Any, base: str) -> dict[str, Schema]:
    _names(place, keyword, value, base)
    return {name: place.positive(of, base) for name, of in value.items()}


def _by_pattern(place: Place, keyword: str, value: Any, base: str) -> dict[str, Schema]:
    return {rust_pattern(name): place.positive(of, base) for name, of in value.items()}


_KEPT: dict[str, Callable[[Place, str, Any, str], Any]] = {
    "type": _same,
    "multipleOf": _same,
    "const": _constants,
    "enum": _constants,
    "pattern": _pattern,
    "properties": _by_name,
    "patternProperties": _by_pattern,
    "additionalProperties": _schema,
    "required": _names,
    "items": _schema,
    "prefixItems": _schemas,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bound),
}


# ---- Keywords that are expressed by others -----------------------------------------------------


def _format(place: Place, schema: dict[str, Any], base: str) -> Schema:
    name = schema["format"]
    if name not in FORMATS:
        # The standard makes unknown formats annotations.
        return True
    return unless("string", FORMATS[name])


def _all(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return all_of(place.positive(part, base) for part in schema["allOf"])


def _any(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return any_of(place.positive(part, base) for part in schema["anyOf"])


def _one(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return one_of(place, schema, base)


def _not(place: Place, schema: dict[str, Any], base: str) -> Schema:
    return place.negative(schema["not"], base)


_ADDED: dict[str, Callable[[Place, dict[str, Any], str], Schema]] = {
    "format": _format,
    "allOf": _all,
    "anyOf": _any,
    "oneOf": _one,
    "not": _not,
    "if": conditions,
    "propertyNames": property_names,
    "contains": contains,
    "uniqueItems": unique,
    "minProperties": least_properties,
    "maxProperties": most_properties,
}
