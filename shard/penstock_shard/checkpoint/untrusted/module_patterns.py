"""Finds the value that an adapter states for a module, by patterns of the adapter's author.

peft takes the patterns as regular expressions. Our own matcher's time grows only with the length of
the name. It supports characters, classes, repeats of these, alternatives, and groups that are not
repeated.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Bounds on a pattern's length and on its groups' depth.
_LONGEST = 400
_DEEPEST = 8
# Bound on the total length of patterns, except plain names, times the modules. Such work takes a
# second or two.
_MOST_WORK = 2_000_000
_NAME = re.compile(r"(?:[\w-]|\\?\.)+")
_ELEMENT = re.compile(
    r"(?:\\(?P<escaped>[dw.^$/-])|\[(?P<any>[\w.-]+)\]|(?P<plain>[\w./^$-]))(?P<repeat>[*+?]?)"
)
_RANGE = re.compile(r"(.)-(.)")
_WORD = frozenset(string.ascii_letters + string.digits + "_")
_CLASSES = {"d": frozenset(string.digits), "w": _WORD}

# Maps the places where a part of a pattern may begin, as bits, to the places where it may end.
_Step = Callable[["_Name", int], int]


class PatternUnreadable(Exception):
    """A pattern is not supported. The message has the pattern and the reason."""


class ModulePatterns:
    """Maps patterns to values. The first pattern that matches the end of a name applies."""

    def __init__(self, stated: Mapping[str, Any], num_modules: int) -> None:
        """Raises PatternUnreadable, for example if matching `num_modules` names would take long."""
        # Plain names are in a table, because adapters have one for each module.
        self._names: dict[str, tuple[int, Any]] = {}
        self._expressions: list[tuple[int, _Step, Any]] = []
        length = 0
        for order, (pattern, value) in enumerate(stated.items()):
            if _NAME.fullmatch(pattern):
                self._names.setdefault(pattern.replace("\\", ""), (order, value))
                continue
            length += len(pattern)
            if length * num_modules > _MOST_WORK:
                text = f"and those before are {length} characters of expressions"
                raise PatternUnreadable(
                    f"{_short(pattern)} {text} for {num_modules} modules; the product of the two "
                    f"is at most {_MOST_WORK}"
                )
            self._expressions.append((order, _read(pattern), value))

    def value(self, module: str, default: Any) -> Any:
        """Return the value of the first pattern that fits the module, or `default`."""
        parts = module.split(".")
        endings = (".".join(parts[start:]) for start in range(len(parts)))
        found = [self._names[ending] for ending in endings if ending in self._names]
        name = _Name.of(module)
        fits = (each for each in self._expressions if each[1](name, name.begins) >> len(module) & 1)
        found += [(order, value) for order, _, value in fits][:1]
        return min(found, key=lambda each: each[0])[1] if found else default


@dataclass(frozen=True, slots=True)
class _Name:
    """A module's name. `places` maps each character to its places in the name, as bits. `begins`
    are the places where a match may begin.
    """

    length: int
    places: Mapping[str, int]
    begins: int

    @classmethod
    def of(cls, module: str) -> _Name:
        places: dict[str, int] = {}
        for place, character in enumerate(module):
            places[character] = places.get(character, 0) | 1 << place
        return cls(len(module), places, 1 | places.get(".", 0) << 1)

    def places_of(self, characters: Iterable[str] | None) -> int:
        """Return the places of these characters; of all characters if None."""
        if characters is None:
            return (1 << self.length) - 1
        found = 0
        for character in characters:
            found |= self.places.get(character, 0)
        return found


def _read(pattern: str) -> _Step:
    """Compile a pattern. Raises PatternUnreadable if it is not supported."""
    if len(pattern) > _LONGEST:
        raise PatternUnreadable(
            f"{_short(pattern)} has {len(pattern)} characters; {_LONGEST} are served"
        )
    step, end = _alternatives(pattern, 0, 0)
    if end < len(pattern):
        raise _refused(pattern, end)
    return step


def _alternatives(pattern: str, at: int, depth: int) -> tuple[_Step, int]:
    branches = []
    while True:
        steps, at = _sequence(pattern, at, depth)
        branches.append(steps)
        if pattern[at : at + 1] != "|":
            return _one_of(branches), at
        at += 1


def _sequence(pattern: str, at: int, depth: int) -> tuple[Sequence[_Step], int]:
    steps: list[_Step] = []
    while at < len(pattern) and pattern[at] not in "|)":
        if pattern[at] == "(":
            step, at = _group(pattern, at, depth + 1)
        else:
            step, at = _element(pattern, at)
        steps.append(step)
    return steps, at


def _group(pattern: str, at: int, depth: int) -> tuple[_Step, int]:
    begin = at + (3 if pattern.startswith("(?:", at) else 1)
    if depth > _DEEPEST:
        raise _refused(pattern, at)
    step, end = _alternatives(pattern, begin, depth)
    if pattern[end : end + 1] != ")" or pattern[end + 1 : end + 2] in ("*", "+", "?", "{"):
        raise _refused(pattern, at)
    return step, end + 1


def _element(pattern: str, at: int) -> tuple[_Step, int]:
    match = _ELEMENT.match(pattern, at)
    # Lazy, possessive and counted repeats are refused.
    if match is None or pattern[match.end() : match.end() + 1] in ("*", "+", "?", "{"):
        raise _refused(pattern, at)
    repeat = match["repeat"]
    if match["plain"] in ("^", "$"):
        if repeat:
            raise _refused(pattern, at)
        return (_begin if match["plain"] == "^" else _end), match.end()
    return _characters(_meant(match), repeat), match.end()


def _meant(match: re.Match[str]) -> frozenset[str] | None:
    """Return the characters that an element matches; None if it matches any."""
    escaped: str | None = match["escaped"]
    if escaped:
        return _CLASSES.get(escaped, frozenset(escaped))
    if within := match["any"]:
        ranges = [range(ord(first), ord(last) + 1) for first, last in _RANGE.findall(within)]
        singles = _RANGE.sub("", within)
        # Names are ASCII, so other characters are ignored.
        return frozenset(singles).union(*([chr(each) for each in r if each < 128] for r in ranges))
    return None if match["plain"] == "." else frozenset(match["plain"])


def _characters(meant: frozenset[str] | None, repeat: str) -> _Step:
    def step(name: _Name, starts: int) -> int:
        fits = name.places_of(meant)
        once = (starts & fits) << 1
        if repeat in ("", "?"):
            return once | starts if repeat else once
        return _run_on(once, fits) | (starts if repeat == "*" else 0)

    return step


def _run_on(starts: int, fits: int) -> int:
    """Return `starts` and all places that they reach over `fits`."""
    length = 1
    while fits:
        starts |= (starts & fits) << length
        fits &= fits >> length
        length *= 2
    return starts


def _one_of(branches: Sequence[Sequence[_Step]]) -> _Step:
    def step(name: _Name, starts: int) -> int:
        ends = 0
        for branch in branches:
            places = starts
            for each in branch:
                places = each(name, places)
            ends |= places
        return ends

    return step


def _begin(name: _Name, starts: int) -> int:
    return starts & 1


def _end(name: _Name, starts: int) -> int:
    return starts & 1 << name.length


def _refused(pattern: str, at: int) -> PatternUnreadable:
    served = "names, classes of characters, repeats of one of these, and alternatives are"
    return PatternUnreadable(f"{_short(pattern)}: {_short(pattern[at:])} is not served; {served}")


def _short(pattern: str) -> str:
    return repr(pattern[:80])
