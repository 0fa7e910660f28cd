"""Blocks of which it is not known yet whether they are right: what a peer sent, and what was
computed on top of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class HasCopies(Protocol):
    """A prefix, with the slots of host memory that have copies of its blocks, by cache group."""

    slots: list[int]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Doubt:
    """Of the blocks of one fetch; `before` is that of what precedes them, if it is not settled.

    `is_lie` is None while it is open. Not a lie: they are what is computed here, and so is all that
    precedes them.
    """

    source: str
    before: Doubt | None = None
    is_lie: bool | None = None
    # Copies in host memory, by prefix and group: of the blocks, and of what was computed on them.
    copies: list[tuple[HasCopies, int]] = field(default_factory=list)

    def chain(self) -> list[Doubt]:
        """It and those before it, as far as they are not known to be right."""
        found: list[Doubt] = []
        doubt: Doubt | None = self
        while doubt is not None and doubt.is_lie is not False:
            found.append(doubt)
            doubt = doubt.before
        return found


def is_proven(doubt: Doubt | None) -> bool:
    """Whether blocks with this doubt are right."""
    return doubt is None or doubt.is_lie is False


def is_wrong(doubt: Doubt | None) -> bool:
    """Whether blocks with this doubt are a lie, or rely on one."""
    return doubt is not None and any(each.is_lie for each in doubt.chain())


def may_follow(before: Doubt | None, doubt: Doubt | None) -> bool:
    """Whether blocks with one doubt may be used behind those with another: none that are wrong; and
    none that are right behind others of which that is not known, or what is computed behind them
    would seem right too.
    """
    return not is_wrong(doubt) and (is_proven(before) or not is_proven(doubt))
