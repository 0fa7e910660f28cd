"""Completes a part of a schema with the definitions that it refers to, so that it can stand
alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from penstock_router.json_fields import JsonObject

_PLACES = ("$defs", "definitions")
# References with unknown targets.
_DYNAMIC = ("$dynamicRef", "$recursiveRef")
# Maximum look-ups for all parts together; later parts get all definitions.
_MAX_LOOKUPS = 2**14

# A definition's place and name; None if a reference, such as an anchor, may mean any definition.
_Reached = tuple[str, str] | None


class Definitions:
    def __init__(self, schema: JsonObject) -> None:
        self._all = {key: schema[key] for key in _PLACES if isinstance(schema.get(key), dict)}
        # `_direct` has a definition's direct references, `_reached` all definitions that a set of
        # references reaches.
        self._direct: dict[_Reached, frozenset[_Reached]] = {}
        self._reached: dict[frozenset[_Reached], JsonObject] = {}
        self._left = _MAX_LOOKUPS

    def given_to(self, part: JsonObject) -> JsonObject:
        if not self._all:
            return part
        begins = _references(part)
        if begins not in self._reached:
            self._reached[begins] = self._reached_from(begins)
        return self._reached[begins] | part

    def _reached_from(self, begins: frozenset[_Reached]) -> JsonObject:
        seen, waiting = set(begins), list(begins)
        while waiting and None not in seen:
            self._left -= 1
            if self._left < 0:
                return self._all
            new = self._referred_by(waiting.pop()) - seen
            seen |= new
            waiting += new
        return self._all if None in seen else self._named(seen)

    def _referred_by(self, definition: _Reached) -> frozenset[_Reached]:
        if definition not in self._direct:
            place, name = definition or ("", "")
            self._direct[definition] = _references(self._all.get(place, {}).get(name))
        return self._direct[definition]

    def _named(self, names: Iterable[_Reached]) -> JsonObject:
        found: JsonObject = {}
        # Sorted, so that all processes have the same order.
        for place, name in sorted(filter(None, names)):
            if name in self._all.get(place, ()):
                found.setdefault(place, {})[name] = self._all[place][name]
        return found


def _references(schema: Any) -> frozenset[_Reached]:
    """Find the definitions to which a schema refers, at any depth."""
    found: set[_Reached] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            if isinstance(part.get("$ref"), str):
                found.add(_place(part["$ref"]))
            if any(key in part for key in _DYNAMIC):
                found.add(None)
    return frozenset(found)


def _place(reference: str) -> _Reached:
    """Return the definition that a reference points to or into."""
    start, *steps = unquote(reference).split("/", 3)
    if start != "#" or len(steps) < 2 or steps[0] not in _PLACES:
        return None
    return steps[0], steps[1].replace("~1", "/").replace("~0", "~")
