"""The inputs of a step in one buffer, so that one copy brings them to the device."""

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

# Triton specializes kernels on whether an address is a multiple of 16.
_ALIGNMENT = 64

Numbers = TypeVar("Numbers")


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[Numbers]):
    """The inputs of one forward; see `AttentionBatch` for the names. `kv_indices` are where the
    tokens' keys and values go, counted over all blocks (its `slots`). `adapters` is empty where no
    token has an adapter; `extra` are other numbers that share the copy. Some differ from cache
    group to cache group.
    """

    input_ids: Numbers
    positions: Numbers
    adapters: Numbers
    extra: Numbers
    cu_queries: Numbers
    # For each cache group.
    kv_indices: Sequence[Numbers]
    cu_keys: Sequence[Numbers]
    seq_lens: Sequence[Numbers]
    block_table: Sequence[Numbers]


@dataclass(frozen=True)
class InputLayout:
    """Where the inputs lie in a buffer, for given numbers of tokens, rows, blocks in a row's table,
    extra numbers and cache groups: first those of 8 bytes, then those of 4.
    """

    num_tokens: int
    num_rows: int
    num_blocks: int
    num_extra: int
    has_adapters: bool = False
    num_groups: int = 1

    @cached_property
    def _wide(self) -> list[int]:
        """The lengths of the parts of 8 bytes a number, each followed by that of a gap."""
        tokens = self.num_tokens
        adapters = tokens if self.has_adapters else 0
        return _with_gaps(
            [tokens, tokens, adapters, self.num_extra, *[tokens] * self.num_groups],
            _ALIGNMENT // 8,
        )

    @cached_property
    def _narrow(self) -> list[int]:
        """The same of 4 bytes a number."""
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
    """Each length and what it lacks to a multiple."""
    return [each for length in lengths for each in (length, -length % multiple)]


def _slices(numbers: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """The parts of these lengths, without the gap behind each."""
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
    """What the attention of each cache group is told of a step's rows: their inputs, and what the
    host knows of them; `seq_lens` has a column for each group, and `bidirectional` those rows.
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
