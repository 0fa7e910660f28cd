"""The positions at which a sequence's states are kept for other sequences.

A state sums up all tokens before it and cannot be shortened. So a sequence can continue a cached
prefix only where a state was kept: at multiples of a spacing, after a prompt's last full block, and
where a prompt leaves the known prefix. Steps end at these positions. A kept state is a copy, made
between the step that wrote the state and the next.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Numbers of tokens after which a sequence's state is kept."""

    spacing: int
    # Positions that are not multiples of the spacing.
    others: abc.Collection[int] = ()

    def has(self, count: int) -> bool:
        return count % self.spacing == 0 or count in self.others

    def next_after(self, count: int) -> int:
        later = [other for other in self.others if other > count]
        return min([(count // self.spacing + 1) * self.spacing, *later])
