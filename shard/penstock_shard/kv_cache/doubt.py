"""Doubt about blocks that may be wrong: a peer sent them, or they were computed from such
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class HasCopies(Protocol):
    """A prefix, with the host memory slots of its blocks' copies, by cache group."""

    slots: list[int]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Doubt:
    """Doubt about the blocks of one fetch. `before` is the doubt about the blocks before them.

    `is_lie` is None until settled. It is False if these blocks, and all before them, equal what
    this shard computes.
    """

    source: str
    before: Doubt | None = None
    is_lie: bool | None = None
    # Host memory copies of these blocks and of blocks computed from them, by prefix and group.
    copies: list[tuple[HasCopies, int]] = field(default_factory=list)

    def chain(self) -> list[Doubt]:
        """Return this doubt and those before it, up to the first known to be right."""
        found: list[Doubt] = []
        doubt: Doubt | None = self
        while doubt is not None and doubt.is_lie is not False:
            found.append(doubt)
            doubt = doubt.before
        return found


def is_proven(doubt: Doubt | None) -> bool:
    """Tell whether blocks with this doubt are known to be right."""
    return doubt is None or doubt.is_lie is False


def is_wrong(doubt: Doubt | None) -> bool:
    """Tell whether blocks with this doubt are known to be wrong, or follow wrong ones."""
    return doubt is not None and any(each.is_lie for each in doubt.chain())


def may_follow(before: Doubt | None, doubt: Doubt | None) -> bool:
    """Tell whether blocks with `doubt` may be used after blocks with `before`.

    Wrong blocks may not. Right blocks may not follow blocks in doubt, because blocks computed from
    both would seem right.
    """
    return not is_wrong(doubt) and (is_proven(before) or not is_proven(doubt))
