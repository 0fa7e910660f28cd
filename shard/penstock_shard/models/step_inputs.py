"""A step's inputs in one buffer, so that one copy brings them to the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch

# Triton specializes kernels on addresses that are multiples of 16.
_ALIGNMENT = 64

Numbers = TypeVar("Numbers")


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[Numbers]):
    """The inputs of one forward; see `AttentionBatch`. `kv_indices` are its `slots`: the tokens'
    indices in the KV cache, counted over all blocks. `adapters` is empty if no token has an
    adapter. `extra` are other numbers in the same copy.
    """

    input_ids: Numbers
    positions: Numbers
    adapters: Numbers
    extra: Numbers
    cu_queries: Numbers
    # One array for each cache group.
    kv_indices: Sequence[Numbers]
    cu_keys: Sequence[Numbers]
    seq_lens: Sequence[Numbers]
    block_table: Sequence[Numbers]


@dataclass(frozen=True)
class InputLayout:
    """The places of inputs in a buffer, for given numbers of tokens, rows, blocks in a row's table,
    extra numbers and cache groups. 8-byte numbers come first, then 4-byte ones.
    """

    num_tokens: int
    num_rows: int
    num_blocks: int
    num_extra: int
    has_adapters: bool = False
    num_groups: int = 1

    @cached_property
    def _wide(self) -> list[int]:
        """Lengths of the 8-byte parts, each followed by the length of its gap."""
        tokens = self.num_tokens
        adapters = tokens if self.has_adapters else 0
        return _with_gaps(
            [tokens, tokens, adapters, self.num_extra, *[tokens] * self.num_groups],
            _ALIGNMENT // 8,
        )

    @cached_property
    def _narrow(self) -> list[int]:
        """Lengths of the 4-byte parts, each followed by the length of its gap."""
        rows, groups = self.num_rows, self.num_groups
        sums, lengths, tables = [rows + 1] * groups, [rows] * groups, [rows * self.num_blocks]
        return _with_gaps([rows + 1, *sums, *lengths, *tables * groups], _ALIGNMENT // 4)

    @cached_property
    def _num_wide_bytes(self) -> int:
        return 8 * sum(self._wide)

    @property
    def num_bytes(self) -> int:
        return self._num_wide_bytes + 4 * sum(self._narrow)

    def arrays(self, buffer: NDArray[np.uint8]) -> StepInputs[NDArray[Any]]:
        """The parts of a buffer in host memory."""
        wide = buffer[: self._num_wide_bytes].view(np.int64)
        narrow = buffer[self._num_wide_bytes :].view(np.int32)
        return self._inputs(
            _slices(wide, self._wide),
            _slices(narrow, self._narrow),
            lambda table: table.reshape(self.num_rows, self.num_blocks),
        )

    def tensors(self, buffer: Tensor) -> StepInputs[Tensor]:
        """The parts of a uint8 buffer on the device."""
        wide = buffer[: self._num_wide_bytes].view(torch.int64)
        narrow = buffer[self._num_wide_bytes :].view(torch.int32)
        return self._inputs(
            wide.split_with_sizes(self._wide)[::2],
            narrow.split_with_sizes(self._narrow)[::2],
            lambda table: table.view(self.num_rows, self.num_blocks),
        )

    def _inputs(
        self,
        wide: Sequence[Numbers],
        narrow: Sequence[Numbers],
        shaped: Callable[[Numbers], Numbers],
    ) -> StepInputs[Numbers]:
        ids, positions, adapters, extra, *kv_indices = wide
        cu_queries, *rest = narrow
        count = self.num_groups
        cu_keys, seq_lens = rest[:count], rest[count : 2 * count]
        tables = [shaped(table) for table in rest[2 * count :]]
        return StepInputs(
            ids, positions, adapters, extra, cu_queries, kv_indices, cu_keys, seq_lens, tables
        )


def _with_gaps(lengths: Sequence[int], multiple: int) -> list[int]:
    """Return each length, followed by the gap to the next multiple."""
    return [each for length in lengths for each in (length, -length % multiple)]


def _slices(numbers: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    ends = list(itertools.accumulate(lengths, initial=0))
    return [numbers[start:end] for start, end in zip(ends[::2], ends[1::2], strict=False)]


def attention_batches(
    inputs: StepInputs[Tensor],
    query_lens: Sequence[int],
    seq_lens: Sequence[Sequence[int]],
    num_decodes: int,
    block_size: int,
    bidirectional: Sequence[frozenset[int]] | None = None,
) -> tuple[AttentionBatch, ...]:
    """The attention batch of each cache group, from a step's inputs and the host's lengths.
    `seq_lens` has a column, and `bidirectional` a set of rows, for each group.
    """
    bidirectional = bidirectional or [frozenset()] * len(seq_lens)
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
            bidirectional=bidirectional[group],
        )
        for group, lengths in enumerate(seq_lens)
    )
