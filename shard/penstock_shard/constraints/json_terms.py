"""Schemas as values: how they are put together. Knows the types of JSON, no keyword's meaning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

# A schema is a dict or a bool; what is in one is any JSON.
Schema = Any
TYPES = ("null", "boolean", "number", "string", "array", "object")


class Place(Protocol):
    """What rewriting a keyword may ask for; `base` is the URI that references are read by."""

    def positive(self, schema: Schema, base: str) -> Schema:
        """A schema of the same texts in keywords that llguidance knows, or of fewer."""
        ...

    def negative(self, schema: Schema, base: str) -> Schema:
        """A schema of texts that `schema` forbids: all of them, or fewer."""
        ...

    def resolve(self, keyword: str, reference: object, base: str) -> tuple[Schema, str]:
        """What a reference means, and the base of that."""
        ...

    def base(self, schema: Schema, base: str) -> str:
        """The base of what is in `schema`, which stands where `base` is."""
        ...


def all_of(parts: Iterable[Schema]) -> Schema:
    kept = [part for part in parts if part is not True]
    if any(part is False for part in kept):
        return False
    if not kept:
        return True
    return kept[0] if len(kept) == 1 else {"allOf": kept}


def any_of(parts: Iterable[Schema]) -> Schema:
    kept = [part for part in parts if part is not False]
    if any(part is True for part in kept):
        return True
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


def other_types(*types: str) -> Schema:
    """Any value that is of none of these types."""
    left = [name for name in TYPES if name not in types]
    return {"type": left} if left else False


def unless(kind: str, schema: Schema) -> Schema:
    """Any value but one of type `kind`, and such a one where `schema` allows it."""
    return any_of([other_types(kind), all_of([{"type": kind}, schema])])


def at(index: int, schema: Schema) -> Schema:
    """Arrays with such an item there."""
    if schema is False:
        return False
    return {"type": "array", "prefixItems": [True] * index + [schema], "minItems": index + 1}


def without(names: Sequence[str]) -> Schema:
    return {"properties": dict.fromkeys(names, False)}


def type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
