"""Whose turn it is: the order of arrival. Requests that aim for more have `priority_policy.py`.

A policy orders sequences and says whom to preempt.
"""

from __future__ import annotations

from collections import abc

from penstock_shard.scheduler.step_budget import StepBudget
from penstock_shard.sequence import Sequence


class FcfsPolicy:
    """The order of arrival; a sequence that is preempted keeps its place in it."""

    def add(self, sequence: Sequence) -> None:
        """A sequence has arrived."""

    def remove(self, sequence: Sequence) -> None:
        """A sequence is over."""

    def order(self, running: abc.Collection[Sequence], now_s: float) -> list[Sequence]:
        """The running sequences, in the order in which they get rows of a step."""
        return list(running)

    def bound(
        self, budget: StepBudget, decodes: abc.Sequence[Sequence], now_s: float, starts_s: float
    ) -> StepBudget:
        """The budget of a step that has these decodes and starts at `starts_s`."""
        return budget

    def queue(
        self, waiting: abc.Collection[Sequence], budget: StepBudget, now_s: float
    ) -> abc.Iterator[Sequence]:
        """The waiting sequences in the order in which they are admitted, while the budget lasts."""
        return iter(list(waiting))

    def find_outranked(
        self,
        running: abc.Collection[Sequence],
        waiting: abc.Collection[Sequence],
        now_s: float,
        *,
        has_free_slot: bool,
    ) -> Sequence | None:
        """A running sequence that is to make room for one of `waiting`, if any is."""
        return None

    def choose_victim(self, running: abc.Collection[Sequence]) -> Sequence:
        """The running sequence that is preempted first where blocks run out."""
        return max(running, key=lambda sequence: sequence.arrival)
