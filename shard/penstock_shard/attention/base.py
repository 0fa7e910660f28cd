"""Attention over a paged KV cache: the interface of backends, and a step's batch.

Token i of a sequence lives in block `block_table[row, i // block_size]` at offset
`i % block_size`; that place, counted over all blocks, is its slot. Each backend chooses the memory
layout of its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

# The keys and values of one layer, as the backend that made them lays them out.
LayerCache: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a layer keeps of a sequence in place of keys and values, whatever its length, float32:
    the inputs of a short convolution, [taps - 1, channels]; and a matrix of each head, [heads, dim,
    dim_v], of none where `heads` is 0.
    """

    channels: int
    taps: int
    heads: int = 0
    dim: int = 0
    dim_v: int = 0

    @property
    def nbytes(self) -> int:
        convolved = (self.taps - 1) * self.channels
        return 4 * (convolved + self.heads * self.dim * self.dim_v)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The parameters of one attention layer, as its attention call passes them."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    # Keys that a query sees, its own included; None: all up to its own.
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    # Keys are seen from the last position on that is a multiple of this. Backends need not know:
    # the batch of such layers has no earlier keys.
    chunk: int | None = None
    # The values are the first `head_dim_v` elements of the keys, and are not kept apart.
    values_in_keys: bool = False
    # The layer whose keys and values this one reads, in place of any of its own.
    reads: int | None = None
    # What the layer keeps if it does not attend: the other fields have no meaning then.
    state: StateSpec | None = None
    # Tokens of an image see all of it, later ones too.
    bidirectional_images: bool = False

    @property
    def elements_per_token(self) -> int:
        values = 0 if self.values_in_keys else self.head_dim_v
        return self.num_kv_heads * (self.head_dim + values)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One sequence of a step and the keys it needs, for backends that loop over rows in Python."""

    # This row's tokens within the step's T tokens.
    queries: slice
    num_queries: int
    # int32 [n]: the blocks with the keys that the queries see; and the slice of these keys in them.
    blocks: Tensor
    keys: slice
    # Whether queries see the keys of later ones too.
    is_bidirectional: bool = False


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of one step as the layers of one cache group see them, packed one after the
    other along T.

    Row i owns queries `cu_queries[i]` to `cu_queries[i + 1]`, which are the last of its
    `seq_lens[i]` tokens (bottom-right causal). The first `num_decodes` rows have one query each.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    num_decodes: int
    block_size: int
    # int64 [T]: the slots to which the keys and values of this step's tokens are written.
    slots: Tensor
    # int32 [B + 1], [B + 1] and [B], on the device: cumulative sums of query_lens and of seq_lens,
    # from 0; and seq_lens.
    cu_queries: Tensor
    cu_keys: Tensor
    seq_lens_tensor: Tensor
    # int32 [B, max blocks of a row], padded with block 0.
    block_table: Tensor
    # The rows whose queries see the keys of later ones of the row too.
    bidirectional: frozenset[int] = frozenset()

    @cached_property
    def bidirectional_rows(self) -> Tensor | None:
        """int32 [B]: 1 for those rows, on the host; None if there are none."""
        if not self.bidirectional:
            return None
        rows = torch.zeros(len(self.query_lens), dtype=torch.int32)
        rows[sorted(self.bidirectional)] = 1
        return rows

    @cached_property
    def _rows(self) -> dict[int | None, tuple[RowSpan, ...]]:
        return {}

    def rows(self, window: int | None) -> tuple[RowSpan, ...]:
        """The rows for layers with this window; made once a step."""
        rows = self._rows.get(window)
        if rows is None:
            rows = self._rows[window] = tuple(self._spans(window))
        return rows

    def _spans(self, window: int | None) -> Iterator[RowSpan]:
        start = 0
        for i, (count, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            # The first key that the row's first query sees.
            first = 0 if window is None else max(0, length - count - window + 1)
            skipped = first // self.block_size
            blocks = self.block_table[i, skipped : -(-length // self.block_size)]
            offset = skipped * self.block_size
            keys = slice(first - offset, length - offset)
            queries = slice(start, start + count)
            yield RowSpan(queries, count, blocks, keys, i in self.bidirectional)
            start += count

    @cached_property
    def prefill_cu_queries(self) -> Tensor:
        """int32 [B - num_decodes + 1]: `cu_queries` of the rows after the decodes, from 0."""
        sums = self.cu_queries[self.num_decodes :]
        return sums - sums[0]

    @cached_property
    def prefill_cu_keys(self) -> Tensor:
        """int32 [B - num_decodes + 1]: `cu_keys` of the rows after the decodes, from 0."""
        sums = self.cu_keys[self.num_decodes :]
        return sums - sums[0]

    @cached_property
    def masks(self) -> dict[tuple[int, int, int, int | None, bool], Tensor]:
        """Attention masks of this step, shared by its layers; see `sdpa.py`."""
        return {}


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """How scores of queries and keys become weights; see `AttentionBackend.attend`."""

    scale: float
    window: int | None
    softcap: float | None
    # [Hq]
    sinks: Tensor | None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


class Unusable(Exception):
    """A backend cannot run here; the message says why."""


class NotHere(Unusable):
    """This machine lacks what a backend needs: "auto" then passes it over without a message."""


class AttentionBackend(Protocol):
    """Makes a layer's KV cache, writes a step's keys and values to it, and attends over it."""

    name: str
    # Block sizes must be a multiple of this; it is also the default.
    block_multiple: int
    # Whether pure decode steps may run in a CUDA graph: `attend` then reads lengths from
    # `seq_lens_tensor`, `block_table` and `cu_queries`; on the host only the number of rows.
    capturable: bool

    def refusal(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        """Why this backend cannot serve such a layer with activations of this dtype; None if it
        can.
        """

    def make_cache(
        self,
        spec: LayerSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerCache:
        """One layer's KV cache of `num_blocks` blocks; elements are stored as `dtype`."""

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store key [T, Hkv, D] and value [T, Hkv, Dv] at slots int64 [T]; of a layer with
        `values_in_keys` the key alone.
        """

    def memory(self, cache: LayerCache) -> tuple[Tensor, ...]:
        """The tensors [num_blocks, ...] of the cache: keys, and values unless they are in keys."""

    def attend(
        self,
        cache: LayerCache,
        query: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [T, Hq, D] -> [T, Hq, Dv], over the keys and values in the cache. Those of this
        step's tokens must have been written before.

        `sinks` [Hq] are scores of a virtual key with value 0 that each query also sees.
        """


def make_paged_pair(
    spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A cache of keys [num_blocks, block_size, Hkv, D] and values [num_blocks, block_size, Hkv,
    Dv], as GPU libraries read it. Of a layer with `values_in_keys` the second is a view of the
    first.
    """
    # Empty on cpu, where the system commits memory only when it is written. Zeros on a GPU, where
    # kernels read whole blocks and must not meet NaN in slots that were never written.
    make = torch.empty if device.type == "cpu" else torch.zeros
    shape = (num_blocks, block_size, spec.num_kv_heads)
    keys = make(*shape, spec.head_dim, dtype=dtype, device=device)
    if spec.values_in_keys:
        return keys, keys[..., : spec.head_dim_v]
    return keys, make(*shape, spec.head_dim_v, dtype=dtype, device=device)


def has_values_in_keys(cache: tuple[Tensor, Tensor]) -> bool:
    """Whether a pair is that of a layer with `values_in_keys`."""
    return cache[0].data_ptr() == cache[1].data_ptr()


def parts_to_write(
    cache: tuple[Tensor, Tensor], key: Tensor, value: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """The parts of a pair, each with the rows for it: of values that are in keys the keys alone."""
    parts = [(cache[0], key), (cache[1], value)]
    return parts[:1] if has_values_in_keys(cache) else parts


def write_paged_pair(
    cache: tuple[Tensor, Tensor], key: Tensor, value: Tensor, slots: Tensor
) -> None:
    """Store key [T, Hkv, D] and value [T, Hkv, Dv] in a pair, rounded to its dtype; values beyond
    the range of an 8-bit float are clamped to it.
    """
    for part, rows in parts_to_write(cache, key, value):
        places = part.view(-1, *part.shape[2:])
        if part.dtype.itemsize > 1:
            places.index_copy_(0, slots, rows.to(part.dtype))
            continue
        # Clamped because some devices convert too large values to NaN; viewed as bytes because
        # torch has no index_copy_ for 8-bit floats.
        largest = torch.finfo(part.dtype).max
        rounded = rows.clamp(-largest, largest).to(part.dtype)
        places.view(torch.uint8).index_copy_(0, slots, rounded.view(torch.uint8))


class PairBackend:
    """Shared by backends whose cache is a pair from `make_paged_pair`."""

    def make_cache(
        self,
        spec: LayerSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        return make_paged_pair(spec, num_blocks, block_size, dtype, device)

    def write(
        self, cache: tuple[Tensor, Tensor], key: Tensor, value: Tensor, slots: Tensor
    ) -> None:
        write_paged_pair(cache, key, value, slots)

    def memory(self, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return cache[:1] if has_values_in_keys(cache) else cache


def visible_keys(
    num_queries: int,
    num_keys: int,
    offset: int,
    window: int | None,
    is_bidirectional: bool,
    device: torch.device,
) -> Tensor:
    """bool [num_queries, num_keys]: query i is at key index `offset + i` and sees the keys up to
    there, the last `window` of them at most; and all later ones if it is bidirectional.
    """
    position = torch.arange(num_queries, device=device).unsqueeze(1) + offset
    index = torch.arange(num_keys, device=device).unsqueeze(0)
    mask = torch.full_like(index, fill_value=True, dtype=torch.bool)
    if not is_bidirectional:
        mask = index <= position
    if window is not None:
        mask = mask & (index > position - window)
    return mask.expand(num_queries, num_keys)
