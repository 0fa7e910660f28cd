"""Backend over the flash-attn 2 library (>= 2.8), which reads the paged cache in place.

Written against the signatures of `flash_attn_varlen_func` and `flash_attn_with_kvcache` in
flash-attn 2.8: paged caches need blocks of a multiple of 256 tokens, tables and lengths are int32,
data is fp16 or bf16. Knows nothing of models or requests.
"""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from penstock_shard.models.attention.base import (
    AttentionBatch,
    LayerSpec,
    make_paged_pair,
    write_paged_pair,
)


class FlashAttentionBackend:
    """See the module's docstring."""

    name = "flash_attn"
    block_multiple = 256

    def refusal(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        if dtype not in (torch.float16, torch.bfloat16):
            return f"serves float16 and bfloat16, not {dtype}"
        if spec.has_sinks:
            return "does not know attention sinks"
        if spec.head_dim != spec.head_dim_v:
            return f"needs keys and values of one size, not {spec.head_dim} and {spec.head_dim_v}"
        if spec.head_dim > 256 or spec.head_dim % 8:
            return f"head size {spec.head_dim} must be a multiple of 8, at most 256"
        return None

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
        if sinks is not None:
            raise ValueError("flash_attn knows no attention sinks")
        output = query.new_empty(*query.shape[:2], cache[1].shape[3])
        # flash-attn counts the keys to the left of the query, without the query's own.
        sides = (-1, -1) if window is None else (window - 1, 0)
        cap = 0.0 if softcap is None else softcap
        decodes = batch.num_decodes
        if decodes:
            output[:decodes] = _decode(query[:decodes], cache, batch, scale, sides, cap)
        if decodes < len(batch.query_lens):
            output[decodes:] = _prefill(query[decodes:], cache, batch, scale, sides, cap)
        return output


def _decode(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: AttentionBatch,
    scale: float,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """query [num_decodes, Hq, D], one a row -> the same shape."""
    rows = batch.num_decodes
    attended: Tensor = flash_attn_with_kvcache(
        query.unsqueeze(1),
        cache[0],
        cache[1],
        cache_seqlens=batch.seq_lens_tensor[:rows],
        block_table=batch.block_table[:rows],
        softmax_scale=scale,
        causal=True,
        window_size=window_size,
        softcap=softcap,
    )
    return attended.squeeze(1)


def _prefill(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: AttentionBatch,
    scale: float,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """query [T - num_decodes, Hq, D] of the rows after the decodes -> the same shape."""
    rows = batch.num_decodes
    attended: Tensor = flash_attn_varlen_func(
        query,
        cache[0],
        cache[1],
        cu_seqlens_q=batch.prefill_cu_queries,
        cu_seqlens_k=batch.prefill_cu_keys,
        max_seqlen_q=max(batch.query_lens[rows:]),
        max_seqlen_k=max(batch.seq_lens[rows:]),
        softmax_scale=scale,
        causal=True,
        window_size=window_size,
        softcap=softcap,
        block_table=batch.block_table[rows:],
    )
    return attended
