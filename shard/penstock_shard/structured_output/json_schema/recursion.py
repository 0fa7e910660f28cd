"""Recursive definitions that something else must hold beside.

llguidance intersects a reference with what stands beside it only where the reference is not to a
definition that it is in the middle of. So what a recursive reference stands beside becomes, with
the definition itself, a definition of its own, which is then referred to by itself.
"""

from __future__ import annotations

from typing import Any

from penstock_shard.structured_output.json_schema.combine import Schema

_Definitions = dict[str, Schema]


def apart_from_recursion(root: Schema, definitions: _Definitions) -> tuple[Schema, _Definitions]:
    """The same schema and definitions, no reference to a recursive one beside anything else."""
    recursive = _recursive_names(definitions)
    if not recursive:
        return root, definitions
    hoisted: _Definitions = {}
    moved = {name: _moved(of, recursive, hoisted) for name, of in definitions.items()}
    root = _moved(root, recursive, hoisted)
    known = {**moved, **hoisted}
    whole = {name: _with_bodies(of, recursive, known, ()) for name, of in hoisted.items()}
    return root, {**moved, **whole}


def _recursive_names(definitions: _Definitions) -> set[str]:
    """Names of the definitions that refer to themselves, if by others."""
    after = {name: set(_references(of)) for name, of in definitions.items()}
    while done := [name for name, refs in after.items() if not refs & after.keys()]:
        for name in done:
            del after[name]
    return set(after)


def _references(schema: Any) -> list[str]:
    found, left = [], [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                found.append(_name(part))
            left += part.values()
        elif isinstance(part, list):
            left += part
    return found


def _name(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).removeprefix("#/$defs/")


def _refers(schema: Schema, names: set[str]) -> bool:
    return isinstance(schema, dict) and "$ref" in schema and _name(schema) in names


def _moved(schema: Any, recursive: set[str], hoisted: _Definitions) -> Any:
    """The schema with a reference for each part that has a recursive one beside something."""
    if isinstance(schema, list):
        return [_moved(part, recursive, hoisted) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _moved(part, recursive, hoisted) for key, part in schema.items()}
    if not any(_refers(part, recursive) for part in out.get("allOf", ())):
        return out
    name = f"r{len(hoisted)}"
    hoisted[name] = out
    return {"$ref": f"#/$defs/{name}"}


def _with_bodies(
    schema: Schema, recursive: set[str], known: _Definitions, within: tuple[str, ...]
) -> Schema:
    """The schema with the definitions themselves for its recursive references in `allOf`."""
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema and _name(schema) in known and _name(schema) not in within:
        name = _name(schema)
        return _with_bodies(known[name], recursive, known, (*within, name))
    if "allOf" not in schema:
        return schema
    parts = [_with_bodies(part, recursive, known, within) for part in schema["allOf"]]
    return {**schema, "allOf": parts}
