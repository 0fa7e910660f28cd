"""The inputs of a step in one buffer, so that one copy brings them to the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch

# Triton specializes kernels on whether an address is a multiple of 16.
_ALIGNMENT = 64

Numbers = TypeVar("Numbers")


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[Numbers]):
    """The inputs of one forward; see `AttentionBatch` for the names. `kv_indices` are where the
    tokens' keys and values go, counted over all blocks (its `slots`). `adapters` is empty where no
    token has an adapter; `extra` are other numbers that share the copy.

    Where `G` is said, there is one row for each cache group.
    """

    input_ids: Numbers
    positions: Numbers
    adapters: Numbers
    extra: Numbers
    # [G, T]
    kv_indices: Numbers
    cu_queries: Numbers
    # [G, B + 1], [G, B] and [G, B, blocks].
    cu_keys: Numbers
    seq_lens: Numbers
    block_table: Numbers


@dataclass(frozen=True)
class InputLayout:
    """Where the inputs lie in a buffer, for given numbers of tokens, rows, blocks in a row's table
    and extra numbers.
    """

    num_tokens: int
    num_rows: int
    num_blocks: int
    num_extra: int
    has_adapters: bool = False
    num_groups: int = 1

    @cached_property
    def _parts(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """For each part: its shape, and the bytes of each number."""
        groups, rows, tokens = self.num_groups, self.num_rows, (self.num_tokens,)
        adapters = (self.num_tokens if self.has_adapters else 0,)
        by_group = ((groups, rows + 1), (groups, rows), (groups, rows, self.num_blocks))
        return (
            *((shape, 8) for shape in (tokens, tokens, adapters, (self.num_extra,))),
            ((groups, self.num_tokens), 8),
            *((shape, 4) for shape in ((rows + 1,), *by_group)),
        )

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """The byte at which each part begins, and at which the last one ends."""
        offsets = [0]
        for shape, size in self._parts:
            end = offsets[-1] + math.prod(shape) * size
            offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        return tuple(offsets)

    @property
    def num_bytes(self) -> int:
        return self._offsets[-1]

    def arrays(self, buffer: NDArray[np.uint8]) -> StepInputs[NDArray[Any]]:
        """The parts of a buffer in host memory."""
        return StepInputs(
            *(
                buffer[offset : offset + math.prod(shape) * size]
                .view(np.int64 if size == 8 else np.int32)
                .reshape(shape)
                for offset, (shape, size) in zip(self._offsets, self._parts, strict=False)
            )
        )

    def tensors(self, buffer: Tensor) -> StepInputs[Tensor]:
        """The parts of a uint8 buffer on the device."""
        return StepInputs(
            *(
                buffer[offset : offset + math.prod(shape) * size]
                .view(torch.int64 if size == 8 else torch.int32)
                .view(shape)
                for offset, (shape, size) in zip(self._offsets, self._parts, strict=False)
            )
        )


def attention_batches(
    inputs: StepInputs[Tensor],
    query_lens: Sequence[int],
    seq_lens: Sequence[Sequence[int]],
    num_decodes: int,
    block_size: int,
) -> tuple[AttentionBatch, ...]:
    """What the attention of each cache group is told of a step's rows: their inputs, and what the
    host knows of them; `seq_lens` has a column for each group.
    """
    return tuple(
        AttentionBatch(
            query_lens=query_lens,
            seq_lens=lengths,
            num_decodes=num_decodes,
            block_size=block_size,
            slots=inputs.kv_indices[group],
            cu_queries=inputs.cu_queries,
            cu_keys=inputs.cu_keys[group],
            seq_lens_tensor=inputs.seq_lens[group],
            block_table=inputs.block_table[group],
        )
        for group, lengths in enumerate(seq_lens)
    )
