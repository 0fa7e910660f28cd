"""Base of the backends over GPU attention libraries. A step makes two calls: for its decodes, and
for all other rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock_shard.attention.base import (
    AttentionBatch,
    LayerSpec,
    PairBackend,
    ScoreParams,
)
from penstock_shard.attention.sdpa import attend_bidirectional
from penstock_shard.device.dtypes import dtype_name

_HALF = (torch.float16, torch.bfloat16)

# A layer's keys and values.
Pair: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """A layer's attention parameters, in the libraries' form."""

    scale: float
    # Earlier keys that a query sees; -1 for all.
    left: int
    # 0 for no softcap.
    softcap: float


class LibraryBackend(PairBackend, ABC):
    """The part of an `AttentionBackend` that does not depend on the library."""

    name: str
    version: str
    block_multiple: int
    # Calls for decodes take no lengths from the host, except the block table's width.
    capturable = True

    def refusal(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        if dtype not in _HALF:
            return f"serves float16 and bfloat16, not {dtype_name(dtype)}"
        if spec.values_in_keys:
            return "reads keys and values from caches of their own"
        if spec.has_sinks:
            return "does not know attention sinks"
        for size in (spec.head_dim, spec.head_dim_v):
            if size > 256 or size % 8:
                return f"needs head sizes that are a multiple of 8, at most 256, not {size}"
        return None

    def attend(
        self,
        cache: Pair,
        query: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if sinks is not None:
            raise ValueError(f"{self.name} knows no attention sinks")
        how = AttentionParams(scale, -1 if window is None else window - 1, softcap or 0.0)
        output = self._attend_causal(query, cache, batch, how)
        params = ScoreParams(scale, window, softcap, sinks)
        return attend_bidirectional(output, cache, query, batch, params)

    def _attend_causal(
        self, query: Tensor, cache: Pair, batch: AttentionBatch, how: AttentionParams
    ) -> Tensor:
        decodes = batch.num_decodes
        if decodes == len(batch.query_lens):
            return self._decode(query, cache, batch, how)
        if decodes == 0:
            return self._prefill(query, cache, batch, how)
        parts = (
            self._decode(query[:decodes], cache, batch, how),
            self._prefill(query[decodes:], cache, batch, how),
        )
        return torch.cat(parts)

    @abstractmethod
    def _decode(
        self, query: Tensor, cache: Pair, batch: AttentionBatch, how: AttentionParams
    ) -> Tensor:
        """Attend for the decodes: query [num_decodes, Hq, D] -> [num_decodes, Hq, Dv]."""

    @abstractmethod
    def _prefill(
        self, query: Tensor, cache: Pair, batch: AttentionBatch, how: AttentionParams
    ) -> Tensor:
        """Attend for all other rows: query [T - num_decodes, Hq, D]."""


def serves(dtype: torch.dtype) -> bool:
    return dtype in _HALF
