"""Backend over the CPU kernels. A result's bits are the same in decode and prefill, and in any
batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, LayerSpec
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.kernels.cpu import KEY_TILE, CpuKernels, KvCache, make_cache


class CpuBackend:
    """Supports all attention parameters of a layer."""

    name = "cpu"
    block_multiple = KEY_TILE
    capturable = True

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def refusal(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        return None if dtype is torch.float32 else f"computes in float32, not {dtype_name(dtype)}"

    def make_cache(
        self,
        spec: LayerSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KvCache:
        sizes = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim, spec.head_dim_v)
        return make_cache(*sizes, dtype, values_in_keys=spec.values_in_keys)

    def write(self, cache: KvCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
        self._kernels.write_cache(cache, key.contiguous(), value.contiguous(), slots)

    def memory(self, cache: KvCache) -> tuple[Tensor, ...]:
        return (cache.values,) if cache.keys is None else (cache.keys, cache.values)

    def attend(
        self,
        cache: KvCache,
        query: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._kernels.attention(
            query.contiguous(),
            cache,
            batch.cu_queries,
            batch.seq_lens_tensor,
            batch.block_table,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            bidirectional=batch.bidirectional_rows,
        )
