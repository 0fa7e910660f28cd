"""The policy by order of arrival. `priority_policy.py` is for requests with objectives.

A policy orders sequences and chooses those to preempt.
"""

from __future__ import annotations

from collections import abc

from penstock_shard.scheduler.step_budget import EVERY_CLASS, StepBudget
from penstock_shard.sequence import Sequence


class FcfsPolicy:
    """The order of arrival. A preempted sequence keeps its place in this order."""

    def add(self, sequence: Sequence) -> None:
        """Note a sequence that arrived."""

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended."""

    def order(self, running: abc.Collection[Sequence], now_s: float) -> list[Sequence]:
        """Order the running sequences as they get rows of a step."""
        return list(running)

    def bound(
        self, budget: StepBudget, decodes: abc.Sequence[Sequence], now_s: float, starts_s: float
    ) -> StepBudget:
        """Bound the budget of a step that has these decodes and starts at `starts_s`."""
        return budget

    def first_class(self, sequences: abc.Iterable[Sequence]) -> int:
        """The highest class among the sequences with prompts; `EVERY_CLASS` if classes do not
        matter.
        """
        return EVERY_CLASS

    def queue(
        self, waiting: abc.Collection[Sequence], budget: StepBudget, now_s: float
    ) -> abc.Iterator[Sequence]:
        """Order the waiting sequences as they are admitted, while the budget lasts."""
        return iter(list(waiting))

    def find_outranked(
        self,
        running: abc.Collection[Sequence],
        waiting: abc.Collection[Sequence],
        now_s: float,
        *,
        has_free_slot: bool,
    ) -> Sequence | None:
        """Find a running sequence that is to make room for one of `waiting`."""
        return None

    def choose_victim(self, running: abc.Collection[Sequence]) -> Sequence:
        """Choose the running sequence to preempt when blocks run out."""
        return max(running, key=lambda sequence: sequence.arrival)
