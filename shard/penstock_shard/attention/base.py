"""Attention over a paged KV cache: the interface of backends, and a step's batch.

Token i of a sequence is in block b = `block_table[row, i // block_size]`; its slot is `b *
block_size + i % block_size`. Each backend has its own cache layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

# The keys and values of one layer, in the layout of a backend.
LayerCache: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state that a layer keeps for each sequence in place of keys and values. In float32, it
    has the inputs of a short convolution, [taps - 1, channels], and unless `heads` is 0, matrices
    [heads, dim, dim_v].
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
    """The parameters of one attention layer."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    # The number of keys that a query sees, including its own; None if it sees all earlier keys.
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    # A query sees only keys from the last multiple of `chunk` on. A batch has no keys before that,
    # so backends ignore this field.
    chunk: int | None = None
    # Values are the first `head_dim_v` elements of keys, and are not stored again.
    values_in_keys: bool = False
    # The layer that has the keys and values for this one; None if it has its own.
    reads: int | None = None
    # The state that the layer has in place of attention, if any. The other fields then have no
    # meaning.
    state: StateSpec | None = None
    # True if tokens of an image see the whole image.
    bidirectional_images: bool = False

    @property
    def elements_per_token(self) -> int:
        values = 0 if self.values_in_keys else self.head_dim_v
        return self.num_kv_heads * (self.head_dim + values)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A sequence of a step and the keys it needs, for backends that loop over rows in Python."""

    # This row's tokens among the step's T tokens.
    queries: slice
    num_queries: int
    # int32 [n]: the blocks with the keys that the queries see. `keys` is the slice of these keys
    # among all slots of the blocks.
    blocks: Tensor
    keys: slice
    # True if queries also see the keys of later queries.
    is_bidirectional: bool = False


@dataclass(frozen=True)
class AttentionBatch:
    """A step's sequences, one in each row, for the layers of a cache group. Their tokens are
    concatenated along T.

    Row i owns queries `cu_queries[i]` to `cu_queries[i + 1]`, which are the last of its
    `seq_lens[i]` tokens (bottom-right causal). The first `num_decodes` rows have one query each.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    num_decodes: int
    block_size: int
    # int64 [T]: the slots of this step's tokens.
    slots: Tensor
    # The next 3 fields are int32 on the device: cumulative sums of query_lens and of seq_lens, from
    # 0, [B + 1]; and seq_lens, [B].
    cu_queries: Tensor
    cu_keys: Tensor
    seq_lens_tensor: Tensor
    # int32 [B, max blocks of a row], padded with block 0.
    block_table: Tensor
    # Rows in which queries also see the keys of later queries.
    bidirectional: frozenset[int] = frozenset()

    @cached_property
    def bidirectional_rows(self) -> Tensor | None:
        """int32 [B] on the host: 1 for bidirectional rows; None if there are none."""
        if not self.bidirectional:
            return None
        rows = torch.zeros(len(self.query_lens), dtype=torch.int32)
        rows[sorted(self.bidirectional)] = 1
        return rows

    @cached_property
    def _rows(self) -> dict[int | None, tuple[RowSpan, ...]]:
        return {}

    def rows(self, window: int | None) -> tuple[RowSpan, ...]:
        """Return the rows for layers with this window, cached for the step."""
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
        """int32 [B - num_decodes + 1]: `cu_queries` without decodes, from 0."""
        sums = self.cu_queries[self.num_decodes :]
        return sums - sums[0]

    @cached_property
    def prefill_cu_keys(self) -> Tensor:
        """int32 [B - num_decodes + 1]: `cu_keys` without decodes, from 0."""
        sums = self.cu_keys[self.num_decodes :]
        return sums - sums[0]

    @cached_property
    def masks(self) -> dict[tuple[int, int, int, int | None, bool], Tensor]:
        """Attention masks, shared by the step's layers; see `sdpa.py`."""
        return {}


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """The parameters that turn scores into weights; see `AttentionBackend.attend`."""

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
    """The machine lacks a requirement of a backend; "auto" skips it without a message."""


class AttentionBackend(Protocol):
    """Makes a layer's KV cache, writes a step's keys and values to it, and attends over it."""

    name: str
    # Block sizes must be a multiple of this, which is also the default.
    block_multiple: int
    # True if CUDA graphs may capture steps of decodes, because `attend` reads lengths only on the
    # device (`seq_lens_tensor`, `block_table`, `cu_queries`).
    capturable: bool

    def refusal(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        """Return why this backend cannot serve a layer with activations of this dtype; None if it
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
        """Make one layer's KV cache, with elements of `dtype`."""

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store key [T, Hkv, D] and value [T, Hkv, Dv] at slots int64 [T]; with `values_in_keys`,
        store only the key.
        """

    def memory(self, cache: LayerCache) -> tuple[Tensor, ...]:
        """Return the cache's tensors [num_blocks, ...]: keys, and values unless they are in the
        keys.
        """

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
        """Attend with query [T, Hq, D] over the cache, which already has this step's keys and
        values; return [T, Hq, Dv].

        `sinks` [Hq] has scores of a virtual key with value 0 that each query also sees.
        """


def make_paged_pair(
    spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Make keys [num_blocks, block_size, Hkv, D] and values [num_blocks, block_size, Hkv, Dv], the
    layout of GPU libraries. With `values_in_keys`, the values are a view of the keys.
    """
    # On cpu, the system commits memory on the first write. GPU kernels read whole blocks and must
    # not meet NaN in unwritten slots.
    make = torch.empty if device.type == "cpu" else torch.zeros
    shape = (num_blocks, block_size, spec.num_kv_heads)
    keys = make(*shape, spec.head_dim, dtype=dtype, device=device)
    if spec.values_in_keys:
        return keys, keys[..., : spec.head_dim_v]
    return keys, make(*shape, spec.head_dim_v, dtype=dtype, device=device)


def has_values_in_keys(cache: tuple[Tensor, Tensor]) -> bool:
    """Tell whether this is the pair of a layer with `values_in_keys`."""
    return cache[0].data_ptr() == cache[1].data_ptr()


def parts_to_write(
    cache: tuple[Tensor, Tensor], key: Tensor, value: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of a pair, each with the rows to write to it. Values that are in keys are
    left out.
    """
    parts = [(cache[0], key), (cache[1], value)]
    return parts[:1] if has_values_in_keys(cache) else parts


def write_paged_pair(
    cache: tuple[Tensor, Tensor], key: Tensor, value: Tensor, slots: Tensor
) -> None:
    """Store key [T, Hkv, D] and value [T, Hkv, Dv] in a pair, rounded to its dtype, and clamped to
    the range of 8-bit floats.
    """
    for part, rows in parts_to_write(cache, key, value):
        places = part.view(-1, *part.shape[2:])
        if part.dtype.itemsize > 1:
            places.index_copy_(0, slots, rows.to(part.dtype))
            continue
        # Some devices convert too large values to NaN. torch has no index_copy_ for 8-bit floats,
        # so copy bytes.
        largest = torch.finfo(part.dtype).max
        rounded = rows.clamp(-largest, largest).to(part.dtype)
        places.view(torch.uint8).index_copy_(0, slots, rounded.view(torch.uint8))


class PairBackend:
    """Base of backends with a cache from `make_paged_pair`."""

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
    """Return a mask, bool [num_queries, num_keys]. Query i is at key `offset + i`, and sees the
    last `window` keys, including that key. If bidirectional, it also sees all later keys.
    """
    position = torch.arange(num_queries, device=device).unsqueeze(1) + offset
    index = torch.arange(num_keys, device=device).unsqueeze(0)
    mask = torch.full_like(index, fill_value=True, dtype=torch.bool)
    if not is_bidirectional:
        mask = index <= position
    if window is not None:
        mask = mask & (index > position - window)
    return mask.expand(num_queries, num_keys)
