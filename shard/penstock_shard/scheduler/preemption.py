"""The order of preemption when blocks or slots run out."""

from __future__ import annotations

from penstock_proto.types import Objective
from penstock_shard.sequence import Sequence


def preemption_key(sequence: Sequence) -> tuple[int, bool, int]:
    """Return a key; the largest is preempted first: lowest class, then no objective, then latest
    arrival.
    """
    return (
        sequence.request.priority,
        _is_indifferent(sequence.request.objective),
        sequence.arrival,
    )


def _is_indifferent(objective: Objective | None) -> bool:
    return objective is None or objective == Objective(priority=objective.priority)
