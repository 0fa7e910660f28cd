"""Combines schemas."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from typing import Any, Protocol

# A schema is a dict or a bool; its values are any JSON.
Schema = Any
TYPES = ("null", "boolean", "number", "string", "array", "object")


class Place(Protocol):
    """Services for code that rewrites a keyword. `base` is the base URI of references."""

    # True if generation checks that items and names differ (`distinct/`).
    is_watched: bool

    def positive(self, schema: Schema, base: str) -> Schema:
        """A schema of the same texts or fewer, in keywords that llguidance knows."""
        ...

    def negative(self, schema: Schema, base: str) -> Schema:
        """A schema of all texts that `schema` forbids, or of fewer."""
        ...

    def resolve(self, keyword: str, reference: object, base: str) -> tuple[Schema, str]:
        """The schema that a reference means, and its base URI."""
        ...

    def read(self, schema: Schema, base: str) -> tuple[Schema, str]:
        """Check a schema. Return it as `modern` rewrites it, and the base URI inside it."""
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
    """Values of all other types."""
    left = [name for name in TYPES if name not in types]
    return {"type": left} if left else False


def unless(kind: str, schema: Schema) -> Schema:
    """Allow all values of other types, and the values of type `kind` that `schema` allows."""
    return any_of([other_types(kind), all_of([{"type": kind}, schema])])


def at(index: int, schema: Schema) -> Schema:
    """Arrays with an item at `index` that meets `schema`."""
    if schema is False:
        return False
    return {"type": "array", "prefixItems": [True] * index + [schema], "minItems": index + 1}


def without(names: abc.Sequence[str]) -> Schema:
    return {"properties": dict.fromkeys(names, False)}
