"""The rows of a step while it is planned, and the runner's batch."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from penstock_shard.sequence import Sequence, SequenceState
from penstock_shard.worker.base import Batch


@dataclass(slots=True)
class Row:
    """Tokens [start, start + count) of a sequence. See `Batch` for the other fields."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    scored: int = 0
    drafts: abc.Sequence[int] = ()


@dataclass(slots=True)
class Rows:
    """A step's rows in columns, as in a batch. A step often has hundreds of decodes, for which
    columns cost much less than objects.
    """

    sequences: list[Sequence]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    scored: list[int]
    drafts: list[abc.Sequence[int]]

    @classmethod
    def of_decodes(cls, sequences: list[Sequence], starts: list[int]) -> Rows:
        n = len(sequences)
        return cls(sequences, starts, [1] * n, [True] * n, [0] * n, [()] * n)

    @classmethod
    def of(cls, rows: abc.Iterable[Row]) -> Rows:
        columns = cls([], [], [], [], [], [])
        for row in rows:
            columns.insert(len(columns.starts), row)
        return columns

    def insert(self, index: int, row: Row) -> None:
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
        """Make a runner's batch. `new_blocks` are each row's new blocks (see `Batch`); `admitted`
        are the sequences that got a slot for this step.
        """
        return Batch(
            [sequence.slot for sequence in self.sequences],
            self.starts,
            self.counts,
            self.samples,
            self.scored,
            self.drafts,
            new_blocks,
            list(admitted),
            state_copies,
        )


def split(running: abc.Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Split sequences into those that lack one token and those that lack more. A sequence is in
    neither if its known and pending tokens reach `max_tokens`: it waits for its last step.
    """
    decodes, prefilling = [], []
    for sequence in running:
        num_tokens = len(sequence.token_ids) + sequence.num_pending
        if num_tokens - sequence.num_computed > 1:
            prefilling.append(sequence)
        elif num_tokens - sequence.num_prompt_tokens < sequence.request.max_tokens:
            decodes.append(sequence)
    return decodes, prefilling


def next_row(sequence: Sequence, count: int) -> Row:
    """Make a row of a sequence's next `count` tokens, and count them as computed."""
    start = sequence.num_computed
    sequence.num_computed = start + count
    scores = 0
    if sequence.needs_prompt_logprobs:
        scores = max(0, min(start + count, sequence.num_prompt_tokens - 1) - start)
    samples = start + count == sequence.num_tokens
    return Row(sequence, start, count, samples, scores)


def num_left(prefilling: abc.Iterable[Sequence], rows: abc.Iterable[Row]) -> int:
    """Count the tokens of begun prompts that are still to be computed, without each prompt's last
    token.
    """
    begun = {*prefilling, *(row.sequence for row in rows)}
    running = (sequence for sequence in begun if sequence.state is SequenceState.RUNNING)
    return sum(max(0, sequence.num_uncomputed - 1) for sequence in running)
