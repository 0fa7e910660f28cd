"""The inputs of a step in one buffer, so that one copy brings them to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """

    input_ids: Numbers
    positions: Numbers
    kv_indices: Numbers
    adapters: Numbers
    extra: Numbers
    cu_queries: Numbers
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

    @cached_property
    def _lengths(self) -> tuple[tuple[int, int], ...]:
        """For each part: how many numbers it has, and the bytes of each number."""
        tokens, rows = (self.num_tokens, 8), self.num_rows
        adapters = (self.num_tokens if self.has_adapters else 0, 8)
        extra = (self.num_extra, 8)
        sums, table = (rows + 1, 4), (rows * self.num_blocks, 4)
        return tokens, tokens, tokens, adapters, extra, sums, sums, (rows, 4), table

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """The byte at which each part begins, and at which the last one ends."""
        offsets = [0]
        for count, size in self._lengths:
            offsets.append(-(-(offsets[-1] + count * size) // _ALIGNMENT) * _ALIGNMENT)
        return tuple(offsets)

    @property
    def num_bytes(self) -> int:
        return self._offsets[-1]

    def arrays(self, buffer: NDArray[np.uint8]) -> StepInputs[NDArray[Any]]:
        """The parts of a buffer in host memory."""
        return self._parts(
            lambda start, end, size: buffer[start:end].view(np.int64 if size == 8 else np.int32),
            lambda table: table.reshape(self.num_rows, self.num_blocks),
        )

    def tensors(self, buffer: Tensor) -> StepInputs[Tensor]:
        """The parts of a uint8 buffer on the device."""
        return self._parts(
            lambda start, end, size: buffer[start:end].view(
                torch.int64 if size == 8 else torch.int32
            ),
            lambda table: table.view(self.num_rows, self.num_blocks),
        )

    def _parts(
        self, part: Callable[[int, int, int], Numbers], shaped: Callable[[Numbers], Numbers]
    ) -> StepInputs[Numbers]:
        ids, positions, kv_indices, adapters, extra, cu_queries, cu_keys, lens, table = (
            part(offset, offset + count * size, size)
            for offset, (count, size) in zip(self._offsets, self._lengths, strict=False)
        )
        return StepInputs(
            ids, positions, kv_indices, adapters, extra, cu_queries, cu_keys, lens, shaped(table)
        )


def attention_batch(
    inputs: StepInputs[Tensor],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_decodes: int,
    block_size: int,
) -> AttentionBatch:
    """What attention is told of a step's rows: their inputs, and what the host knows of them."""
    return AttentionBatch(
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_decodes=num_decodes,
        block_size=block_size,
        slots=inputs.kv_indices,
        cu_queries=inputs.cu_queries,
        cu_keys=inputs.cu_keys,
        seq_lens_tensor=inputs.seq_lens,
        block_table=inputs.block_table,
    )
