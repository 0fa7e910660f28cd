"""The JSON types that a tool's schema allows, for call formats that write strings without quotes.

In these formats, `3` may be a number or a string: only the schema says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
Kinds = frozenset[str]
STRING: Kinds = frozenset({"string"})
NO_STRING: Kinds = frozenset({"object", "array", "number", "integer", "boolean", "null"})
ANY: Kinds = NO_STRING | STRING

_COMBINING = ("anyOf", "oneOf", "allOf")
# Type names that are not JSON Schema's, and keywords that imply a type.
_OTHER_NAMES = {
    **{"str": "string", "int": "integer", "float": "number", "bool": "boolean"},
    **{"dict": "object", "list": "array", "none": "null"},
}
_IMPLIED = {"properties": "object", "items": "array"}
# Real argument schemas are smaller and less deep.
_MAX_DEPTH = 16
_MAX_PARTS = 2_000


@dataclass(frozen=True, slots=True)
class _Within:
    members: Mapping[str, Any]
    # The schema of members that are not in `members`, or None.
    other_members: Any
    items: Any


def kinds_of(schema: Any, root: Schema) -> Kinds:
    """Return the JSON types that a schema allows; empty if it does not say."""
    return SchemaKinds(root).of(schema)


_NOTHING = _Within({}, None, None)
# Schemas with only these keywords contain no other schemas.
_PLAIN = frozenset({"type", "title", "description", "default", "enum", "const"})


class SchemaKinds:
    """Finds the types that a schema within `root` allows, and the schemas of its members and items.
    Each schema is examined only once.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        # Keyed by `id`. The values keep the parts alive, so that no other object gets the same id.
        self._found: dict[int, tuple[Schema, Kinds]] = {}
        self._within: dict[int, tuple[Schema, _Within]] = {}

    def of_argument(self, name: str) -> Kinds:
        """Return the types of an argument, a member of the root schema; string if the schema does
        not describe it.
        """
        return self.of(self.member(self._root, name)) or STRING

    def members(self, schema: Any) -> Mapping[str, Any]:
        return self._what_is_in(schema).members

    def member(self, schema: Any, name: str) -> Any:
        """Return the schema of an object's member; None if there is none."""
        within = self._what_is_in(schema)
        return within.members.get(name, within.other_members)

    def items(self, schema: Any) -> Any:
        return self._what_is_in(schema).items

    def _what_is_in(self, schema: Any) -> _Within:
        if not isinstance(schema, dict):
            return _NOTHING
        if id(schema) not in self._within:
            self._within[id(schema)] = schema, _within(schema, self._root)
        return self._within[id(schema)][1]

    def of(self, schema: Any) -> Kinds:
        if not isinstance(schema, dict):
            return frozenset()
        if schema.keys() <= _PLAIN:
            return _own_kinds(schema)
        if id(schema) not in self._found:
            self._find(schema)
        return self._found[id(schema)][1]

    def _find(self, schema: Schema) -> None:
        """Find the types of a schema and of all schemas that it refers to, even circularly."""
        new: dict[int, tuple[Schema, Kinds]] = {}
        holders: dict[int, list[int]] = {}
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if id(part) in new or id(part) in self._found:
                continue
            new[id(part)] = part, _own_kinds(part)
            for held in _held(part, self._root, _says_kinds):
                holders.setdefault(id(held), []).append(id(part))
                waiting.append(held)
        handed = [*new, *(holders.keys() & self._found.keys())]
        self._found |= new
        while handed:
            at = handed.pop()
            for holder in holders.get(at, ()):
                part, kinds = self._found[holder]
                if not self._found[at][1] <= kinds:
                    self._found[holder] = part, kinds | self._found[at][1]
                    handed.append(holder)


def _within(schema: Schema, root: Schema) -> _Within:
    """Merge the parts of a schema. If several parts describe a member, the first one counts."""
    parts = list(_parts(schema, root))
    named = [part["properties"] for part in parts if isinstance(part.get("properties"), dict)]
    merged = {key: of for each in named[::-1] for key, of in each.items()} if named[1:] else None
    others = (part.get("additionalProperties") for part in parts)
    return _Within(
        # Do not copy members of a single part: many schemas may refer to it.
        merged or (named[0] if named else {}),
        next((each for each in others if isinstance(each, dict)), None),
        next((part["items"] for part in parts if "items" in part), None),
    )


def _says_kinds(schema: Schema) -> bool:
    return "type" in schema or "const" in schema or isinstance(schema.get("enum"), list)


def _own_kinds(schema: Schema) -> Kinds:
    may_be_null = frozenset({"null"} if schema.get("nullable") is True else ())
    if "type" in schema:
        given = schema["type"]
        named = given if isinstance(given, list) else [given]
        known = (_OTHER_NAMES.get(name, name) for name in named if isinstance(name, str))
        return (frozenset(known) & ANY) | may_be_null
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset(map(_kind_of_value, values)) | may_be_null
    implied = (kind for key, kind in _IMPLIED.items() if key in schema)
    return frozenset(implied) | may_be_null


def _parts(schema: Any, root: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas that it refers to or combines, each once."""
    waiting, seen = [schema], set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += _held(part, root)


def _held(
    part: Schema, root: Schema, is_whole: Callable[[Schema], bool] = lambda _: False
) -> list[Schema]:
    """Return the schemas that `part` refers to. Unless `is_whole(part)`, also return the schemas
    that it combines.
    """
    held = [_referred(part["$ref"], root)] if isinstance(part.get("$ref"), str) else []
    if not is_whole(part):
        held += [other for key in _COMBINING for other in _listed(part.get(key))]
    return [each for each in held if isinstance(each, dict)]


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def referred(schema: Schema, root: Schema) -> Schema:
    """Follow references from a schema that has one; otherwise return the schema itself."""
    for _ in range(_MAX_DEPTH):
        found = _referred(schema["$ref"], root) if isinstance(schema.get("$ref"), str) else None
        if not isinstance(found, dict):
            break
        schema = found
    return schema


def _referred(pointer: str, root: Schema) -> Any:
    found: Any = root
    for step in pointer.removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _kind_of_value(value: Any) -> str:
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    )
    return next((kind for each, kind in kinds if isinstance(value, each)), "null")


def outline(schema: Any) -> Schema:
    """Reduce a schema to the types of named values, which is enough to read calls."""
    return _Outliner(schema).outline(schema, 0)


class _Outliner:
    def __init__(self, root: Any) -> None:
        self._root: Schema = root if isinstance(root, dict) else {}
        self._kinds = SchemaKinds(self._root)
        # References may repeat a part, so bound the number of parts.
        self._left = _MAX_PARTS

    def outline(self, schema: Any, depth: int) -> Schema:
        found: Schema = {}
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._left <= 0:
            return found
        if kinds := self._kinds.of(schema):
            found["type"] = sorted(kinds)
        for part in _parts(schema, self._root):
            self._left -= 1
            if self._left < 0:
                break
            self._add(part, found, depth + 1)
        return found

    def _add(self, schema: Schema, found: Schema, depth: int) -> None:
        properties = schema.get("properties")
        if isinstance(properties, dict):
            known = found.setdefault("properties", {})
            known |= {
                name: self.outline(each, depth)
                for name, each in properties.items()
                if name not in known
            }
        for key in ("items", "additionalProperties"):
            if isinstance(schema.get(key), dict) and key not in found:
                found[key] = self.outline(schema[key], depth)
        if isinstance(schema.get("required"), list) and "required" not in found:
            found["required"] = schema["required"]
