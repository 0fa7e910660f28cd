"""Where states of sequences are kept for others to begin at. Plain integers, no torch.

A state is the sum of all tokens before it, and cannot be cut back: a prefix with layers that have
one is taken up only where its state was kept. States are kept at multiples of a spacing, at the
last full block of a prompt, and where a prompt parts from another: steps end there. A kept state is
a copy, made before the step after the one that wrote it.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The numbers of tokens of one sequence after which its state is kept."""

    spacing: int
    # Besides multiples of the spacing.
    others: abc.Collection[int] = ()

    def has(self, count: int) -> bool:
        return count % self.spacing == 0 or count in self.others

    def next_after(self, count: int) -> int:
        later = [other for other in self.others if other > count]
        return min([(count // self.spacing + 1) * self.spacing, *later])
