"""Backend over torch's own `varlen_attn` (torch >= 2.13), which is flash-attn 2 in the torch wheel.

Limits: blocks of a multiple of 256 tokens;
tables, lengths and their sums int32; data fp16 or bf16; head sizes a multiple of 8 up to 256; no
softcap, no sinks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, LayerSpec, NotHere
from penstock_shard.attention.gpu_library import AttentionParams, LibraryBackend, Pair, serves
from penstock_shard.device.dtypes import dtype_name

_NEEDED = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table"}


class TorchVarlen(LibraryBackend):
    name = "torch_varlen"
    block_multiple = 256

    def __init__(self, varlen_attn: Callable[..., Any]) -> None:
        self.version = torch.__version__
        self._varlen_attn = varlen_attn

    def refusal(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        if spec.softcap is not None:
            return "does not know softcaps"
        if spec.head_dim != spec.head_dim_v:
            return f"needs keys and values of one size, not {spec.head_dim} and {spec.head_dim_v}"
        return super().refusal(spec, dtype)

    def _decode(
        self, query: Tensor, cache: Pair, batch: AttentionBatch, how: AttentionParams
    ) -> Tensor:
        rows = slice(0, batch.num_decodes)
        sums = batch.cu_queries[: batch.num_decodes + 1]
        # A decode sees all keys of its row and needs no causal bound. The library groups the query
        # heads of a KV head only if there is no such bound.
        sides = (how.left, -1 if how.left < 0 else 0)
        bound = batch.block_table.shape[1] * batch.block_size
        return self._call(query, cache, batch, rows, sums, (1, bound), how.scale, sides)

    def _prefill(
        self, query: Tensor, cache: Pair, batch: AttentionBatch, how: AttentionParams
    ) -> Tensor:
        rows = slice(batch.num_decodes, len(batch.query_lens))
        longest = max(batch.query_lens[rows]), max(batch.seq_lens[rows])
        sums = batch.prefill_cu_queries
        return self._call(query, cache, batch, rows, sums, longest, how.scale, (how.left, 0))

    def _call(
        self,
        query: Tensor,
        cache: Pair,
        batch: AttentionBatch,
        rows: slice,
        cu_queries: Tensor,
        longest: tuple[int, int],
        scale: float,
        window_size: tuple[int, int],
    ) -> Tensor:
        attended: Tensor = self._varlen_attn(
            query,
            cache[0],
            cache[1],
            cu_queries,
            # Passed in place of the keys' cu_seqlens, which the library does not read if it has a
            # block table, and which would be stale in a captured step.
            cu_queries,
            *longest,
            scale=scale,
            window_size=window_size,
            enable_gqa=query.shape[1] != cache[0].shape[2],
            seqused_k=batch.seq_lens_tensor[rows],
            block_table=batch.block_table[rows],
        )
        return attended


def make_torch_varlen(device: torch.device, dtype: torch.dtype) -> TorchVarlen:
    """Raises Unusable if this torch's `varlen_attn` is missing, takes no block table, or does not
    serve `dtype`.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise NotHere(f"torch {torch.__version__} has no varlen_attn") from error
    if not set(inspect.signature(varlen_attn).parameters) >= _NEEDED:
        raise NotHere(
            f"varlen_attn of torch {torch.__version__} takes no block table; torch 2.13 does"
        )
    if not serves(dtype):
        name = dtype_name(dtype)
        raise NotHere(f"varlen_attn serves float16 and bfloat16, not {name}; change --dtype")
    return TorchVarlen(varlen_attn)
