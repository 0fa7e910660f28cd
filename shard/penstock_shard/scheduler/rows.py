"""The rows of a step while it is planned, and the batch that a runner gets."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass

from penstock_shard.sequence import Sequence, SequenceState
from penstock_shard.worker.base import Admission, Batch


@dataclass(slots=True)
class Row:
    """Tokens [start, start + count) of a sequence; see `Batch` for the rest."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    scored: int = 0
    drafts: abc.Sequence[int] = ()


@dataclass(slots=True)
class Rows:
    """The rows of a step in columns, as a batch has them. Most steps have hundreds of decodes, for
    which columns cost a fraction of what objects do.
    """

    sequences: list[Sequence]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    scored: list[int]
    drafts: list[abc.Sequence[int]]

    @classmethod
    def of_decodes(cls, sequences: list[Sequence], starts: list[int]) -> Rows:
        """A row of one token for each sequence."""
        n = len(sequences)
        return cls(sequences, starts, [1] * n, [True] * n, [0] * n, [()] * n)

    @classmethod
    def of(cls, rows: abc.Iterable[Row]) -> Rows:
        columns = cls([], [], [], [], [], [])
        for row in rows:
            columns.insert(len(columns.starts), row)
        return columns

    def insert(self, index: int, row: Row) -> None:
        """Put a row before the one that has this index."""
        self.sequences.insert(index, row.sequence)
        self.starts.insert(index, row.start)
        self.counts.insert(index, row.count)
        self.samples.insert(index, row.samples)
        self.scored.insert(index, row.scored)
        self.drafts.insert(index, row.drafts)

    def batch(
        self,
        new_blocks: abc.Sequence[abc.Sequence[abc.Sequence[int]]],
        admitted: abc.Iterable[Sequence],
        state_copies: abc.Sequence[tuple[int, int]] = (),
    ) -> Batch:
        """The rows as a runner gets them, with the blocks that are new of each (see `Batch`), and
        with the sequences that were given a slot for this step.
        """
        return Batch(
            [sequence.slot for sequence in self.sequences],
            self.starts,
            self.counts,
            self.samples,
            self.scored,
            self.drafts,
            new_blocks,
            [admission_of(sequence) for sequence in admitted],
            state_copies,
        )


def admission_of(sequence: Sequence) -> Admission:
    """What a runner has to know of a sequence that has a slot."""
    return Admission(
        sequence.slot,
        sequence.request,
        sequence.token_ids[:],
        sequence.adapter_index,
        sequence.constraint,
    )


def num_left(prefilling: Iterable[Sequence], rows: Iterable[Row]) -> int:
    """Tokens still to be computed of prompts that have begun, without the last one of each."""
    begun = {*prefilling, *(row.sequence for row in rows)}
    return sum(
        max(0, sequence.num_uncomputed - 1)
        for sequence in begun
        if sequence.state is SequenceState.RUNNING
    )
