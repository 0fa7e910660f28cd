"""Steps of random tokens on a model that is not serving yet: for checks and measurements at load.

Knows how to make a step. Knows nothing of what is checked.
"""

from __future__ import annotations

import random
from array import array
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import Graphs
from penstock_shard.request import Request, SamplingParams
from penstock_shard.runner.base import ScheduledSequence, StepPlan
from penstock_shard.runner.batch import BatchBuilder
from penstock_shard.sequence import Sequence

# A sequence, the first of its tokens to compute, and how many.
Row = tuple[Sequence, int, int]


class TrialSteps:
    """Gives out sequences, with blocks of their own, and computes parts of them."""

    def __init__(
        self,
        model: CausalModel,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        graphs: Graphs | None = None,
    ) -> None:
        """Uses a cache of `num_blocks`. `decode` uses the static inputs of `graphs`, if given."""
        self.model = model
        self.vocab_size = vocab_size
        self._block_size = block_size
        self._batches = BatchBuilder(block_size, model.device, graphs=graphs)
        self._random = random.Random(1)
        self._free = list(range(num_blocks))
        # So that an error in reading block tables changes results.
        self._random.shuffle(self._free)

    def sequence(self, length: int) -> Sequence:
        """A sequence of random tokens, none of them computed."""
        needed = -(-length // self._block_size)
        blocks, self._free = self._free[:needed], self._free[needed:]
        assert len(blocks) == needed, (
            f"{length} tokens need {needed} blocks, {len(blocks)} are left"
        )
        return _sequence(self._random.choices(range(self.vocab_size), k=length), blocks)

    @torch.inference_mode()
    def run(self, rows: abc.Sequence[Row], logit_rows: abc.Sequence[int] | None = None) -> Tensor:
        """Compute the rows as one step; logits [N, V] of all its tokens, or of `logit_rows`."""
        plan = StepPlan(tuple(ScheduledSequence(*row, samples=False) for row in rows))
        (batch,) = self._batches.build(plan, 1)
        wanted = range(len(batch.input_ids)) if logit_rows is None else logit_rows
        index = torch.tensor(wanted, dtype=torch.int64, device=self.model.device)
        forwarded = self.model.forward(
            batch.input_ids, batch.positions, batch.attention, index, adapters=batch.adapters
        )
        return forwarded.logits

    @torch.inference_mode()
    def decode(self, sequences: abc.Sequence[Sequence]) -> Tensor:
        """Compute the last token of each in one step; a copy of their logits [N, V], which a later
        replay of a graph does not overwrite.
        """
        rows = (
            ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, samples=True)
            for sequence in sequences
        )
        (batch,) = self._batches.build(StepPlan(tuple(rows)), 1)
        forwarded = self.model.forward(
            batch.input_ids,
            batch.positions,
            batch.attention,
            batch.logit_rows,
            adapters=batch.adapters,
        )
        return forwarded.logits.clone()


@contextmanager
def trial_steps(
    model: CausalModel, vocab_size: int, block_size: int, num_blocks: int, kv_dtype: torch.dtype
) -> Iterator[TrialSteps]:
    """`TrialSteps` with a cache that lasts as long as the context. Raises torch's error if memory
    runs out.
    """
    model.allocate(num_blocks, block_size, kv_dtype)
    try:
        yield TrialSteps(model, vocab_size, block_size, num_blocks)
    finally:
        model.free()


def _sequence(token_ids: list[int], block_ids: list[int]) -> Sequence:
    request = Request(
        request_id="trial",
        attempt=0,
        prompt=array("I", token_ids).tobytes(),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=1,
    )
    sequence = Sequence.of(request)
    sequence.block_ids += block_ids
    return sequence
