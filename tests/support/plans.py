"""Steps as a scheduler plans them, with the sequences of their rows; and batches made by hand."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

from penstock_shard.scheduler.rows import Row, Rows
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.worker.base import Batch, RowResult


@dataclass
class Plan:
    """A step that was scheduled."""

    batch: Batch
    rows: list[Row]


def plan_step(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Plan:
    """Schedule a step."""
    batch = scheduler.schedule(*args, **kwargs)
    return Plan(batch, rows_of(scheduler, batch))


def rows_of(scheduler: Scheduler, batch: Batch) -> list[Row]:
    by_slot = {sequence.slot: sequence for sequence in scheduler.slots.holders}
    columns = (batch.starts, batch.counts, batch.samples, batch.scored, batch.drafts)
    return [
        Row(by_slot[slot], *values) for slot, *values in zip(batch.slots, *columns, strict=True)
    ]


def collect(
    scheduler: Scheduler, plan: Plan, token_id: int = 1, seconds: float | None = None
) -> None:
    """Update the scheduler as the engine does after a step. Every row that samples gets the same
    token.
    """
    results = [RowResult(token_id if row.samples else None) for row in plan.rows]
    scheduler.update(plan.batch, results, 0.0, seconds)


def batch_of(
    *rows: Row,
    new_blocks: abc.Sequence[abc.Sequence[abc.Sequence[int]]] | None = None,
    admits: bool = True,
) -> Batch:
    """Rows of sequences that have a slot; with `admits` they have been given it just now. By
    default there is one cache group, in which none got blocks.
    """
    sequences = dict.fromkeys(row.sequence for row in rows) if admits else ()
    return Rows.of(rows).batch(new_blocks or [[()] * len(rows)], sequences)
