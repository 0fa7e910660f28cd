"""Sets of characters, as sorted ranges of code points that neither touch nor overlap."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

Characters = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
ALL: Characters = ((0, LAST),)
LINE_ENDS: Characters = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))


def characters(ranges: Iterable[tuple[int, int]]) -> Characters:
    """The characters of ranges, which may be in any order; both ends are included."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(out[-1][1], high)
        else:
            out.append((low, high))
    return tuple(out)


def all_but(some: Characters) -> Characters:
    edges = [-1, *(edge for pair in some for edge in pair), LAST + 1]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((before + 1, after - 1) for before, after in gaps if before + 1 < after)


def atoms(sets: Iterable[Characters]) -> list[Characters]:
    """The coarsest partition of all characters such that each set is a union of its parts."""
    sets = list(sets)
    edges = sorted({0, LAST + 1, *(edge for some in sets for edge in _begins(some))})
    parts: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for low, after in itertools.pairwise(edges):
        key = tuple(has(some, low) for some in sets)
        parts.setdefault(key, []).append((low, after - 1))
    return [characters(ranges) for ranges in parts.values()]


def has(some: Characters, code: int) -> bool:
    return any(low <= code <= high for low, high in some)


def _begins(some: Characters) -> Iterator[int]:
    """Yield code points at which ranges and gaps begin."""
    for low, high in some:
        yield low
        yield high + 1
