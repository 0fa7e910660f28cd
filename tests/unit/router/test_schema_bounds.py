"""The documented schema of each field agrees with the check of the field, at each bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest

from penstock_router.errors import BadRequest
from penstock_router.json_fields import Field
from penstock_router.routes.table import ROUTES

Schema = dict[str, Any]


def _fields() -> list[Field]:
    """Return the fields of all routes, each name and kind once."""
    tables = [
        table
        for route in ROUTES
        for table in (route.fields or {}, *route.bodies, route.query, route.headers)
    ]
    found = {(name, id(field.kind)): field for table in tables for name, field in table.items()}
    return list(found.values())


def _parts(schema: Any) -> Iterator[Schema]:
    """The schema, and all that it consists of."""
    if isinstance(schema, dict):
        yield schema
        for part in schema.values():
            yield from _parts(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _parts(part)


_SIZED: dict[str, Callable[[int], list[Any]]] = {
    "Length": lambda size: ["a" * size],
    "Items": lambda size: [[item] * size for item in (1, "a", {"type": "text", "text": "a"})],
    "Properties": lambda size: [
        {str(number): entry for number in range(size)} for entry in (1, "")
    ],
}
# Keys of objects: ids of tokens, and what looks like one.
_KEYS = ("", "0", "7" * 9, "1" * 10, "-1", "+1", "1.0", "1\n", "\u0663", "a" * 64, "a" * 65)


def _edges(schema: Schema) -> Iterator[Any]:
    """Values at each of its bounds and beside it."""
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if key in schema:
            bound = schema[key]
            yield from (bound, bound - 1, bound + 1)
    for unit, make in _SIZED.items():
        for bound in (schema.get(f"min{unit}"), schema.get(f"max{unit}")):
            if bound is not None and bound < 10**6:
                yield from (value for size in (bound - 1, bound, bound + 1) for value in make(size))
    yield from schema.get("enum", ())
    if "propertyNames" in schema:
        yield from ({name: entry} for name in _KEYS for entry in (1, ""))


def _values(field: Field) -> Iterator[Any]:
    for part in _parts(field.kind.schema):
        for value in _edges(part):
            yield value
            yield [value]
    # A whole number may be written as 3.0.
    yield from ([], {}, "", "a", True, 3, 3.0, 0.5, [3.0], [0.5], [True])


@pytest.mark.parametrize("field", _fields(), ids=lambda field: field.name)
def test_at_each_bound_of_a_field_its_schema_says_what_its_check_does(field: Field) -> None:
    validator = jsonschema_rs.Draft202012Validator(field.kind.schema)
    # The rules of what a text holds are in no schema.
    in_words = "not valid JSON", "string with the JSON"
    for value in _values(field):
        if value is None:
            continue
        try:
            field.kind.read(field.name, value)
        except BadRequest as error:
            refused = error.message
        else:
            refused = ""
        if not any(words in refused for words in in_words):
            assert validator.is_valid(value) == (not refused), (str(value)[:200], refused)
