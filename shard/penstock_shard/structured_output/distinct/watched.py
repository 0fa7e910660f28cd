"""Finds a schema's watched arrays and objects: their items or names must differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

# A schema is a dict or a bool; its values are any JSON.
Schema = Any
# Stands for `uniqueItems` in prepared schemas; llguidance skips comments.
UNIQUE: dict[str, Any] = {"$comment": "uniqueItems"}
# Schemas with only these keywords restrict nothing themselves.
_HELD = frozenset(("$ref", "anyOf", "allOf"))
_HOLDERS = _HELD | {"$defs", "x-guidance", *UNIQUE}


# A schema with more nodes is assumed to have something watched.
_MOST_NODES = 2000


class Node:
    """The values at one place of the JSON. If several schemas may apply there, the strictest
    counts.
    """

    def __init__(self, watched: Watched, parts: list[Schema]) -> None:
        self._watched = watched
        self._parts = [part for part in parts if part is not UNIQUE]
        objects = [part for part in self._parts if _allows("object", part)]
        # True if an array's items must differ: `parts` had UNIQUE.
        self.is_set = len(self._parts) < len(parts)
        self.is_open = any(map(_is_open, objects))
        # A pattern may allow only few names.
        self.has_patterns = any(part.get("patternProperties") for part in objects)
        self._listed = {name for part in objects for name in part.get("properties", ())}
        self._found: dict[str | int | None, Node] = {}

    def member(self, name: str) -> Node:
        key = name if name in self._listed else None
        if key not in self._found:
            self._found[key] = self._watched.node(self._members(key))
        return self._found[key]

    def item(self, index: int) -> Node:
        if index not in self._found:
            parts = [part for part in self._parts if _allows("array", part)]
            longest = max((len(part.get("prefixItems", ())) for part in parts), default=0)
            if index > longest:
                return self.item(longest)
            self._found[index] = self._watched.node(_item(part, index) for part in parts)
        return self._found[index]

    def _members(self, name: str | None) -> Iterator[Schema]:
        for part in self._parts:
            if _allows("object", part):
                listed = part.get("properties", {})
                if name in listed:
                    yield listed[name]
                else:
                    yield from part.get("patternProperties", {}).values()
                    yield part.get("additionalProperties", True)


class Watched:
    """The watched places of a prepared schema's values. All sequences with the schema
    share them.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._definitions = schema.get("$defs", {})
        self._nodes: dict[frozenset[int], Node] = {}
        self.root = self.node([schema])

    def node(self, schemas: Iterable[Schema]) -> Node:
        parts = list(self._flat(schemas))
        key = frozenset(map(id, parts))
        if key not in self._nodes:
            self._nodes[key] = Node(self, parts)
        return self._nodes[key]

    def _flat(self, schemas: Iterable[Schema]) -> Iterator[dict[str, Any]]:
        """Yield the schemas that may apply together with these. Skip schemas that only hold
        others.
        """
        todo, seen = list(schemas), set()
        while todo:
            schema = _ANYTHING if (last := todo.pop()) is True else last
            if schema is False or id(schema) in seen:
                continue
            seen.add(id(schema))
            if "$comment" in schema:
                yield UNIQUE
            together = schema.get("allOf", [])
            if UNIQUE in together:
                yield UNIQUE
            if not _HELD & schema.keys() or not schema.keys() <= _HOLDERS:
                yield schema
            todo += [*schema.get("anyOf", ()), *(part for part in together if part != UNIQUE)]
            if "$ref" in schema:
                todo.append(self._definitions[schema["$ref"].removeprefix("#/$defs/")])


_ANYTHING: dict[str, Any] = {}


def watched_in(schema: dict[str, Any]) -> Watched | None:
    """Return the watched places of a prepared schema's values; None if there are none."""
    watched = Watched(schema)
    todo = [watched.root]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node.is_set or node.is_open or len(seen) > _MOST_NODES:
            return watched
        if node not in seen:
            seen.add(node)
            todo += _below(node)
    return None


def _below(node: Node) -> Iterator[Node]:
    for name in (*node._listed, None):
        key = "" if name is None else name
        yield node.member(key)
    longest = max((len(part.get("prefixItems", ())) for part in node._parts), default=0)
    yield from (node.item(index) for index in range(longest + 1))


def _item(part: dict[str, Any], index: int) -> Schema:
    first = part.get("prefixItems", ())
    return first[index] if index < len(first) else part.get("items", True)


def _allows(kind: str, part: dict[str, Any]) -> bool:
    """True if a schema allows the type `kind` ("object" or "array") and does not list its
    values.
    """
    types = part.get("type", kind)
    return (kind in types if isinstance(types, list) else kind == types) and not (
        "const" in part or "enum" in part
    )


def _is_open(part: dict[str, Any]) -> bool:
    return part.get("additionalProperties", True) is not False or "patternProperties" in part
