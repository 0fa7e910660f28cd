"""A sampler, and slots for the sequences that it is asked about."""

from __future__ import annotations

import dataclasses
from collections import abc
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock_shard.sequence import Sequence
from penstock_shard.structured_output.matcher_state import MaskFiller
from penstock_shard.worker.base import RowResult
from penstock_shard.worker.logits_processors.order import every_processor
from penstock_shard.worker.sampling.sampler import Sampler, SampleRows


@dataclass(frozen=True)
class SampleRow:
    """The token at `position` of the sequence's output is wanted."""

    sequence: Sequence
    position: int


class Drawer:
    """Admits a sequence when it is first asked about it."""

    def __init__(self, masks: MaskFiller | None = None) -> None:
        self.sampler = Sampler(every_processor(masks))
        self.slots: dict[Sequence, int] = {}
        self._num_slots = 0

    def admit(self, sequence: Sequence) -> int:
        """Give it a slot, as if it came anew with the tokens that it has now."""
        slot = self.slots[sequence] = self._num_slots
        self._num_slots += 1
        known = sequence.token_ids[:]
        self.sampler.admit(dataclasses.replace(sequence, slot=slot, token_ids=known))
        return slot

    def rows(self, rows: abc.Sequence[SampleRow]) -> SampleRows:
        for row in rows:
            if row.sequence not in self.slots:
                self.admit(row.sequence)
        slots = [self.slots[row.sequence] for row in rows]
        return SampleRows(np.array(slots), np.array([row.position for row in rows]))

    def sample(self, logits: Tensor, rows: abc.Sequence[SampleRow]) -> list[RowResult]:
        return self.sampler.sample(logits, self.rows(rows))
