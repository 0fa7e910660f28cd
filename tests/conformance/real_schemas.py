"""Schemas that are in use: those of SchemaStore's catalogue, and of GeoJSON, from the registries.

The catalogue comes as a cache of HTTP answers, which are pickled; they are read without running
anything that a pickle may name.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import sqlite3
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

ROOT = Path(__file__).parents[2]
REAL_SCHEMAS = ROOT / ".venv-clients" / "real-schemas"
SAMPLE_SIZE = 170
# As shards take them by default.
_LARGEST_BYTES = 256 << 10


class _Inert:
    """Stands for whatever a pickle names."""

    def __init__(self, *args: object, **named: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def __call__(self, *args: object, **named: object) -> _Inert:
        return self


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert


def geojson() -> dict[str, Any]:
    """The schemas of GeoJSON by their names; none if they were not fetched."""
    files = (REAL_SCHEMAS / "geojson").glob("[A-Z]*.json")
    return {path.stem: json.loads(path.read_text()) for path in sorted(files)}


@cache
def catalogue() -> dict[str, Any]:
    """Return the catalogue's schemas that stand by themselves, by their keys.

    Each is valid by its own draft, refers to no other document, and is not too long.
    """
    return {key: schema for key, schema in _answers() if _stands_alone(schema)}


def _answers() -> Iterator[tuple[str, Any]]:
    store = sqlite3.connect(REAL_SCHEMAS / "schemastore" / "cache.sqlite")
    for key, pickled in store.execute("SELECT key, value FROM responses ORDER BY key"):
        answer = _Reader(io.BytesIO(pickled)).load()
        try:
            yield key, json.loads(answer["_content"])
        except (ValueError, TypeError):
            continue
    store.close()


def _stands_alone(schema: Any) -> bool:
    if not isinstance(schema, dict) or not schema.keys() & {"$ref", "properties", "type"}:
        return False
    if len(json.dumps(schema).encode()) > _LARGEST_BYTES:
        return False
    if any(not reference.startswith("#") for reference in _references(schema)):
        return False
    try:
        validator_for(schema, Draft202012Validator).check_schema(schema)
    except SchemaError:
        return False
    return True


def _references(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            left += part.values()
        elif isinstance(part, list):
            left += part


def sample(rng: random.Random) -> dict[str, Any]:
    """Return a random sample of the catalogue's schemas, by their keys."""
    return dict(rng.sample(sorted(catalogue().items()), SAMPLE_SIZE))
