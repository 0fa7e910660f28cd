"""Steps of random tokens, for checks and measurements at load."""

from __future__ import annotations

import random
from array import array
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.ipc.runner_info import CacheGroup, pools_for
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import Graphs
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import Batch
from penstock_shard.worker.input_batch import InputBuilder

_GREEDY = EngineSampling(temperature=0.0)
# The largest number of sequences with states.
_MOST_STATES = 48


@dataclass(slots=True)
class RandomSequence:
    token_ids: list[int]
    # One list for each cache group.
    block_ids: list[list[int]]
    adapter_index: int = 0


# A sequence, its first token to compute, and the number of tokens.
Row = tuple[RandomSequence, int, int]


class RandomSteps:
    """Makes sequences with KV blocks, and computes parts of them."""

    def __init__(
        self,
        model: CausalModel,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        graphs: Graphs | None = None,
    ) -> None:
        """Use `num_blocks` of each cache group. `decode` uses the static inputs of `graphs`."""
        self.model = model
        self.vocab_size = vocab_size
        self._block_size = block_size
        self._groups = model.cache_layout.groups
        self._inputs = InputBuilder(block_size, model.device, self._groups, graphs=graphs)
        self._random = random.Random(1)
        self._free = [list(range(size)) for size in _pools(num_blocks, self._groups)]
        # Shuffle, so that an error in reading block tables changes results.
        for blocks in self._free:
            self._random.shuffle(blocks)

    def sequence(self, length: int) -> RandomSequence:
        block_ids = []
        for group in self._groups:
            needed = 1 if group.has_state else -(-length // self._block_size)
            free = self._free[group.pool]
            if group.has_state and len(free) == 1:
                # The last sequences share a state; their results are not compared.
                block_ids.append(free[:1])
                continue
            assert len(free) >= needed, f"{length} tokens need {needed} blocks, of {len(free)} left"
            block_ids.append(free[:needed])
            del free[:needed]
        return RandomSequence(self._random.choices(range(self.vocab_size), k=length), block_ids)

    @torch.inference_mode()
    def run(self, rows: abc.Sequence[Row], logit_rows: abc.Sequence[int] | None = None) -> Tensor:
        """Compute the rows as one step; return logits [N, V] of all tokens, or of `logit_rows`."""
        inputs = self._inputs.build(_batch(rows))
        wanted = range(len(inputs.input_ids)) if logit_rows is None else logit_rows
        index = torch.tensor(wanted, dtype=torch.int64, device=self.model.device)
        forwarded = self.model.forward(
            inputs.input_ids, inputs.positions, inputs.attention, index, adapters=inputs.adapters
        )
        return forwarded.logits

    @torch.inference_mode()
    def decode(self, sequences: abc.Sequence[RandomSequence]) -> Tensor:
        """Compute each sequence's last token in one step; return a copy of the logits [N, V], which
        later replays of a graph do not overwrite.
        """
        rows = [(sequence, len(sequence.token_ids) - 1, 1) for sequence in sequences]
        inputs = self._inputs.build(_batch(rows, samples=True))
        forwarded = self.model.forward(
            inputs.input_ids,
            inputs.positions,
            inputs.attention,
            inputs.logit_rows,
            adapters=inputs.adapters,
        )
        return forwarded.logits.clone()


@contextmanager
def random_steps(
    model: CausalModel, vocab_size: int, block_size: int, num_blocks: int, kv_dtype: torch.dtype
) -> Iterator[RandomSteps]:
    """Yield `RandomSteps` with `num_blocks` of each cache group, freed at the end. Raises torch's
    error if memory runs out.
    """
    pools = _pools(num_blocks, model.cache_layout.groups)
    model.allocate(pools, block_size, kv_dtype)
    try:
        yield RandomSteps(model, vocab_size, block_size, num_blocks)
    finally:
        model.free()


def _pools(num_blocks: int, groups: abc.Sequence[CacheGroup]) -> list[int]:
    """Return the sizes of the pools, with at most `_MOST_STATES` states."""
    pools = pools_for(num_blocks, groups)
    for group in groups:
        if group.has_state:
            pools[group.pool] = min(num_blocks, _MOST_STATES)
    return pools


def _batch(rows: abc.Sequence[Row], *, samples: bool = False) -> Batch:
    """Make a batch of the rows, which admits each sequence again."""
    sequences = list({id(sequence): sequence for sequence, _, _ in rows}.values())
    slots = {id(sequence): slot for slot, sequence in enumerate(sequences)}
    own = [slots[id(sequence)] for sequence, _, _ in rows]
    return Batch(
        slots=own,
        starts=[start for _, start, _ in rows],
        counts=[count for _, _, count in rows],
        samples=[samples] * len(rows),
        scored=[0] * len(rows),
        drafts=[()] * len(rows),
        # A sequence's blocks are new only in its first row.
        new_blocks=[
            [
                sequences[slot].block_ids[group] if slot not in own[:row] else ()
                for row, slot in enumerate(own)
            ]
            for group in range(len(sequences[0].block_ids))
        ],
        admitted=[in_slot(slot, sequence) for slot, sequence in enumerate(sequences)],
    )


def in_slot(
    slot: int, sequence: RandomSequence, sampling: EngineSampling = _GREEDY, **fields: Any
) -> Sequence:
    """Return the sequence as the scheduler's, in a slot; `fields` are fields of its request."""
    request = EngineRequest(
        request_id="trial",
        attempt=0,
        prompt=array("I", sequence.token_ids).tobytes(),
        sampling=sampling,
        max_tokens=1,
        **fields,
    )
    found = Sequence.of(request, sequence.adapter_index)
    found.slot = slot
    return found
