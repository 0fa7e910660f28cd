"""The rows of a step while it is planned, and the batch that a runner gets. Knows no order."""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass

from penstock_shard.runner.base import Admission, Batch
from penstock_shard.sequence import Sequence


@dataclass(slots=True)
class Row:
    """Tokens [start, start + count) of a sequence; see `Batch` for the rest."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    scored: int = 0
    drafts: abc.Sequence[int] = ()


def batch_of(
    rows: abc.Sequence[Row],
    new_blocks: abc.Sequence[abc.Sequence[int]],
    admitted: abc.Iterable[Sequence],
) -> Batch:
    """The rows as a runner gets them, with the blocks that are new of each, and with the sequences
    that were given a slot for this step.
    """
    return Batch(
        slots=[row.sequence.slot for row in rows],
        starts=[row.start for row in rows],
        counts=[row.count for row in rows],
        samples=[row.samples for row in rows],
        scored=[row.scored for row in rows],
        drafts=[row.drafts for row in rows],
        new_blocks=new_blocks,
        admitted=[admission_of(sequence) for sequence in admitted],
    )


def admission_of(sequence: Sequence) -> Admission:
    """What a runner has to know of a sequence that has a slot."""
    return Admission(
        sequence.slot,
        sequence.request,
        array("I", sequence.token_ids),
        sequence.adapter_index,
        sequence.constraint,
    )
