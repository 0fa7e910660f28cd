"""The default policy: order of arrival. `priority_policy.py` is for requests with objectives.

A policy orders sequences and chooses which to preempt.
"""

from __future__ import annotations

from collections import abc

from penstock_shard.scheduler.step_budget import EVERY_CLASS, StepBudget
from penstock_shard.sequence import Sequence


class FcfsPolicy:
    """Order of arrival. A preempted sequence keeps its place."""

    def add(self, sequence: Sequence) -> None:
        """Note an arrived sequence."""

    def remove(self, sequence: Sequence) -> None:
        """Forget an ended sequence."""

    def order(self, running: abc.Collection[Sequence], now_s: float) -> list[Sequence]:
        """Order the running sequences for the rows of a step."""
        return list(running)

    def bound(
        self, budget: StepBudget, decodes: abc.Sequence[Sequence], now_s: float, starts_s: float
    ) -> StepBudget:
        """Bound the budget of a step that has these decodes and starts at `starts_s`."""
        return budget

    def first_class(self, sequences: abc.Iterable[Sequence]) -> int:
        """Return the highest class among sequences with prompts; `EVERY_CLASS` if classes do not
        matter.
        """
        return EVERY_CLASS

    def queue(
        self, waiting: abc.Collection[Sequence], budget: StepBudget, now_s: float
    ) -> abc.Iterator[Sequence]:
        """Yield the waiting sequences in the order to admit them, while the budget lasts."""
        return iter(list(waiting))

    def find_outranked(
        self,
        running: abc.Collection[Sequence],
        waiting: abc.Collection[Sequence],
        now_s: float,
        *,
        has_free_slot: bool,
    ) -> Sequence | None:
        """Find a running sequence to preempt for one of `waiting`."""
        return None

    def choose_victim(self, running: abc.Collection[Sequence]) -> Sequence:
        """Choose the running sequence to preempt when blocks run out."""
        return max(running, key=lambda sequence: sequence.arrival)
