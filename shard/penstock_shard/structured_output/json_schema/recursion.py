"""Separates recursive definitions from schemas that must hold at the same time.

llguidance intersects a reference with its neighbours in `allOf`, but not while it expands the
reference's definition. So a reference to a recursive definition, and its neighbours, become a new
definition with the old one's body. A lone reference to the new definition replaces them.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from typing import Any

from penstock_common.json_schema.keywords import subschemas, with_subschemas
from penstock_shard.structured_output.json_schema.combine import Schema
from penstock_shard.structured_output.refusal import ConstraintRefused

_MOST_HOISTED = 500
_Definitions = dict[str, Schema]


def apart_from_recursion(root: Schema, definitions: _Definitions) -> tuple[Schema, _Definitions]:
    """The same schema and definitions; each reference to a recursive definition stands alone."""
    recursive = _recursive_names(definitions)
    if not recursive:
        return root, definitions
    hoisted: _Definitions = {}
    moved = {name: _moved(of, recursive, hoisted) for name, of in definitions.items()}
    root = _moved(root, recursive, hoisted)
    bodies = {name: moved[name] for name in recursive} | hoisted
    whole = {name: _with_bodies(of, bodies, ()) for name, of in hoisted.items()}
    return root, {**moved, **whole}


def _recursive_names(definitions: _Definitions) -> set[str]:
    """Names of definitions that refer to themselves, even indirectly, and of definitions between
    two such.
    """
    after = {name: set(_references(of)) for name, of in definitions.items()}
    before = {name: {other for other in after if name in after[other]} for name in after}
    for towards in (after, before):
        while done := [name for name, others in towards.items() if not others & towards.keys()]:
            for name in done:
                after.pop(name)
                before.pop(name)
    return set(after)


def _references(schema: Schema) -> Iterator[str]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if "$ref" in part:
                yield _name(part)
            left += subschemas(part)


def _name(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).removeprefix("#/$defs/")


def _refers(schema: Schema, names: abc.Set[str]) -> bool:
    return isinstance(schema, dict) and "$ref" in schema and _name(schema) in names


def _moved(schema: Schema, recursive: set[str], hoisted: _Definitions) -> Schema:
    """Replace each `allOf` that has a recursive reference by a reference to a new definition."""
    if not isinstance(schema, dict):
        return schema
    cases = _cases(schema, recursive)
    if cases:
        return {"anyOf": [_moved(case, recursive, hoisted) for case in cases]}
    out = with_subschemas(schema, lambda part: _moved(part, recursive, hoisted))
    if not any(_refers(part, recursive) for part in out.get("allOf", ())):
        return out
    if len(hoisted) >= _MOST_HOISTED:
        raise ConstraintRefused(
            f"json_schema: over {_MOST_HOISTED} cases beside recursive references"
        )
    name = f"r{len(hoisted)}"
    hoisted[name] = out
    return {"$ref": f"#/$defs/{name}"}


def _cases(schema: dict[str, Any], recursive: set[str]) -> list[Schema]:
    """If alternatives in a part of `allOf` have recursive references, return a schema for each of
    them.
    """
    parts = schema.get("allOf", [])
    for index, part in enumerate(parts):
        some = part.get("anyOf", []) if isinstance(part, dict) else []
        if any(_refers(each, recursive) for each in some):
            rest = {key: value for key, value in part.items() if key != "anyOf"}
            others = [*parts[:index], *([rest] if rest else []), *parts[index + 1 :]]
            return [{**schema, "allOf": [*others, each]} for each in some]
    return []


def _with_bodies(schema: Schema, bodies: _Definitions, within: tuple[str, ...]) -> Schema:
    """Replace references to these definitions in `allOf` by their bodies."""
    if not isinstance(schema, dict):
        return schema
    if _refers(schema, bodies.keys()) and _name(schema) not in within:
        return _with_bodies(bodies[_name(schema)], bodies, (*within, _name(schema)))
    if "allOf" not in schema:
        return schema
    return {**schema, "allOf": [_with_bodies(part, bodies, within) for part in schema["allOf"]]}
