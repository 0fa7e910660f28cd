"""Backend over our own Triton kernels, which read the paged cache in place.

It was checked only in Triton's interpreter and never ran on hardware.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from penstock_shard.attention.base import (
    AttentionBatch,
    LayerSpec,
    PairBackend,
    ScoreParams,
    has_values_in_keys,
    parts_to_write,
)
from penstock_shard.attention.sdpa import attend_bidirectional
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.kernels.triton_attention import (
    MOST_SPLITS,
    SPLIT,
    combine_kernel,
    rows_kernel,
    split_kernel,
)
from penstock_shard.kernels.triton_device import shared_bytes
from penstock_shard.kernels.triton_layers import write_heads

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The largest amount of memory for partial results of splits.
_SCRATCH_BYTES = 256 << 20
# This many programs without keys take as long as one program takes for a key.
_KEYS_PER_PROGRAM = 3


class TritonBackend(PairBackend):
    """Supports all attention parameters, with heads of at most 256 elements, or latents of at most
    512. If `exact`, a result's bits depend only on the query and its keys.
    """

    name = "triton"
    block_multiple = 16
    capturable = True

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact

    def refusal(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        if dtype not in _DTYPES:
            return f"serves float32, float16 and bfloat16, not {dtype_name(dtype)}"
        if spec.values_in_keys:
            return _latent_refusal(spec.head_dim_v, spec.head_dim - spec.head_dim_v)
        size = max(spec.head_dim, spec.head_dim_v)
        return f"serves heads of at most 256, not {size}" if size > 256 else None

    def write(
        self, cache: tuple[Tensor, Tensor], key: Tensor, value: Tensor, slots: Tensor
    ) -> None:
        for part, heads in parts_to_write(cache, key, value):
            write_heads(part, heads, slots)

    def attend(
        self,
        cache: tuple[Tensor, Tensor],
        query: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        how = ScoreParams(scale, window, softcap, sinks)
        call = _Call(cache, query.contiguous(), batch, how)
        decodes, rows = batch.num_decodes, len(batch.query_lens)
        if self.exact:
            call.by_splits(len(query), SPLIT)
        else:
            call.by_splits(decodes, call.split_for(decodes))
            if decodes < rows:
                call.by_rows()
        return attend_bidirectional(call.output, cache, query, batch, how)


def _latent_refusal(latent: int, rotated: int) -> str | None:
    if latent <= 512 and 0 < rotated <= 64:
        return None
    return f"serves latents of at most 512 beside 1 to 64 rotated elements, not {latent}, {rotated}"


@dataclass(frozen=True, slots=True)
class _Tiling:
    """The size of a tile (query heads of one KV head, queries, keys), and the launch options."""

    heads: int
    queries: int
    keys: int
    num_warps: int
    num_stages: int


@functools.cache
def _split_tiling(group: int, padded: int, itemsize: int, shared: int) -> _Tiling:
    """Return the tiling for decodes. Reading keys and values takes most of their time, so a tile
    has few rows, and several tiles of keys and values are in flight. With 16-bit values, a tile of
    keys has 16 kB, or less if the tiles do not fit into a program's `shared` bytes.
    """
    rows = max(16, group)
    if itemsize == 4:
        return _Tiling(group, rows // group, 16, 8, 2)
    keys = 64 if padded <= 128 else 32
    # Shared memory has the queries, two tiles each of keys and values, and the weights.
    while keys > 16 and ((rows + 4 * keys) * padded + rows * keys) * itemsize > shared:
        keys //= 2
    return _Tiling(group, rows // group, keys, 4 if rows < 64 else 8, 5)


@functools.cache
def _rows_tiling(group: int, padded: int, itemsize: int, shared: int) -> _Tiling:
    """Return the tiling for prefills. Their time depends on how often keys and values are read, so
    a tile has as many rows as fit into registers and, beside keys and values, into `shared` bytes.
    """
    if itemsize == 4:
        rows = max(32, group)
        return _Tiling(group, rows // group, 32 if padded <= 128 else 16, 8, 1)
    rows, keys = max(128, group), 64
    # Shared memory has the queries, and two tiles each of keys and values.
    if (rows + 4 * keys) * padded * itemsize > shared:
        keys = 32
    if (rows + 4 * keys) * padded * itemsize > shared:
        rows = max(64, group)
    return _Tiling(group, rows // group, keys, 8 if rows >= 128 else 4, 3 if padded <= 128 else 2)


@functools.cache
def _latent_tiling(group: int, padded: int, itemsize: int, shared: int, least: int) -> _Tiling:
    """Return the tiling for latents. A tile has few rows, because each row fills registers with
    sums of up to 512 values. The number of rows is `least` or the number of heads, whichever is
    larger, but it has a bound. With 16-bit values, the bound is 64 if 64 rows and two tiles of keys
    fit into `shared` bytes, else 32, because queries then take registers too.
    """
    if itemsize == 4:
        most, keys, num_stages = 16, 16, 2
    else:
        keys, num_stages = 32, 3
        most = 64 if (64 + 2 * keys) * padded * itemsize <= shared else 32
    heads = min(group, most)
    rows = min(most, max(least, heads))
    num_warps = 8 if rows > 16 or itemsize == 4 else 4
    return _Tiling(heads, rows // heads, keys, num_warps, num_stages)


def _split_for(num_pairs: int, num_keys: int) -> int:
    """Return the number of keys in the smallest split. `num_pairs` pairs of a query and a part of
    its heads have up to `num_keys` keys each.

    Programs are launched for all splits that the block table has room for, and most find no keys.
    In a microsecond, an H200 should run about 400 programs without keys, three at once on each
    multiprocessor, while a program with keys should read about 130 of them. The size balances these
    estimates, which were never measured.
    """
    size = SPLIT
    while size * size * _KEYS_PER_PROGRAM < num_pairs * num_keys:
        size *= 2
    return size


class _Call:
    """The kernel launches of one layer's attention in one step."""

    def __init__(
        self, cache: tuple[Tensor, Tensor], query: Tensor, batch: AttentionBatch, mask: ScoreParams
    ) -> None:
        self._cache = cache
        self._query = query
        self._batch = batch
        self._mask = mask
        _, page, self._kv_heads, dim = cache[0].shape
        self._heads, self._dim_v = query.shape[1], cache[1].shape[3]
        latent = self._dim_v if has_values_in_keys(cache) else 0
        group = triton.next_power_of_2(self._heads // self._kv_heads)
        padded = max(16, triton.next_power_of_2(dim - latent))
        self._padded_v = max(16, triton.next_power_of_2(self._dim_v))
        self._shape: dict[str, Any] = {
            "WINDOW": mask.window or 0,
            "SOFTCAP": mask.softcap is not None,
            "PAGE": page,
            "HEADS": self._heads,
            "KV_HEADS": self._kv_heads,
            "DIM": dim,
            "DIM_V": self._dim_v,
            "LATENT": latent,
            "PADDED": padded,
            "PADDED_V": self._padded_v,
        }
        self.output = query.new_empty(len(query), self._heads, self._dim_v)
        sizes = query.element_size(), shared_bytes(query.device)
        if latent:
            row = padded + self._padded_v
            self._split_tiling = _latent_tiling(group, row, *sizes, 16)
            self._rows_tiling = _latent_tiling(group, row, *sizes, 64)
        else:
            row = max(padded, self._padded_v)
            self._split_tiling = _split_tiling(group, row, *sizes)
            self._rows_tiling = _rows_tiling(group, row, *sizes)

    def split_for(self, num_tokens: int) -> int:
        """Return the number of keys in the smallest split for `num_tokens` decodes that need not be
        exact.
        """
        num_keys = min(self._most_keys, self._mask.window or self._most_keys)
        return _split_for(num_tokens * self._parts(self._split_tiling), num_keys)

    def by_splits(self, num_tokens: int, smallest: int) -> None:
        """Compute the first `num_tokens` tokens with splits of at least `smallest` keys. Take only
        as many tokens at once as fit into scratch memory.
        """
        tiling = self._split_tiling
        num_splits = self._num_splits(tiling.queries, smallest)
        token_bytes = self._heads * num_splits * (self._dim_v + 2) * 4
        at_once = max(1, _SCRATCH_BYTES // token_bytes)
        for low in range(0, num_tokens, at_once):
            high = min(low + at_once, num_tokens)
            self._some_by_splits(tiling, (num_splits, smallest), low, high)

    def by_rows(self) -> None:
        """Compute all other rows, each tile of queries by one program."""
        batch, tiling = self._batch, self._rows_tiling
        decodes, rows = batch.num_decodes, len(batch.query_lens)
        num_tiles = (len(self._query) - decodes) // tiling.queries + 2 * (rows - decodes)
        rows_kernel[(num_tiles * self._parts(tiling),)](
            self.output,
            *self._inputs(),
            self._sinks(),
            self._mask.scale,
            self._mask.softcap or 0.0,
            batch.block_table.stride(0),
            decodes,
            rows,
            SINKS=self._mask.sinks is not None,
            **self._launch(tiling),
        )

    def _some_by_splits(
        self, tiling: _Tiling, splits: tuple[int, int], low: int, high: int
    ) -> None:
        """Compute tokens [low, high). `splits` has the largest number of splits of a tile, and the
        number of keys in the smallest split.
        """
        batch, num_splits = self._batch, splits[0]
        decodes, rows = batch.num_decodes, len(batch.query_lens)
        first, last = self._tile_of(low, tiling.queries), self._tile_of(high - 1, tiling.queries)
        shape = (high - low, self._heads, num_splits)
        empty = functools.partial(torch.empty, dtype=torch.float32, device=self._query.device)
        parts = (empty((*shape, self._dim_v)), empty(shape), empty(shape))
        split_kernel[((last + 1 - first) * self._parts(tiling), num_splits)](
            *self._inputs(),
            *parts,
            self._mask.scale,
            self._mask.softcap or 0.0,
            batch.block_table.stride(0),
            decodes,
            rows,
            first,
            low,
            high,
            *splits,
            **self._launch(tiling),
        )
        combine_kernel[(high - low, self._heads)](
            self.output,
            *parts,
            batch.cu_queries,
            batch.seq_lens_tensor,
            self._sinks(),
            decodes,
            rows,
            low,
            *splits,
            SINKS=self._mask.sinks is not None,
            WINDOW=self._shape["WINDOW"],
            HEADS=self._heads,
            DIM_V=self._dim_v,
            PADDED_V=self._padded_v,
            num_warps=max(1, self._padded_v // 128),
        )

    def _shares(self, tiling: _Tiling) -> int:
        """Return the number of programs that share the query heads of one KV head."""
        return int(triton.cdiv(self._heads // self._kv_heads, tiling.heads))

    def _parts(self, tiling: _Tiling) -> int:
        """Return the number of programs that share all query heads."""
        return self._kv_heads * self._shares(tiling)

    def _inputs(self) -> tuple[Tensor, ...]:
        batch = self._batch
        return (
            self._query,
            *self._cache,
            batch.block_table,
            batch.cu_queries,
            batch.seq_lens_tensor,
        )

    def _sinks(self) -> Tensor:
        """Return the sinks. Without sinks, return any tensor, because kernels do not read it."""
        return self.output if self._mask.sinks is None else self._mask.sinks

    def _launch(self, tiling: _Tiling) -> dict[str, Any]:
        return {
            **self._shape,
            "SHARES": self._shares(tiling),
            "GROUP": tiling.heads,
            "QUERIES": tiling.queries,
            "BLOCK_N": tiling.keys,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }

    @property
    def _most_keys(self) -> int:
        return self._batch.block_table.shape[1] * self._batch.block_size

    def _num_splits(self, queries: int, smallest: int) -> int:
        """Return the largest number of splits that a tile can see."""
        most = min(MOST_SPLITS, -(-self._most_keys // smallest))
        window = self._mask.window
        return most if window is None else min(most, (window + queries - 2) // smallest + 2)

    def _tile_of(self, token: int, queries: int) -> int:
        batch, decodes = self._batch, self._batch.num_decodes
        if token < decodes:
            return token
        begins = [0, *itertools.accumulate(batch.query_lens)]
        row = bisect_right(begins, token) - 1
        start = batch.seq_lens[row] - batch.query_lens[row]
        inner = (start + token - begins[row]) // queries - start // queries
        return decodes + (begins[row] - decodes) // queries + 2 * (row - decodes) + inner
