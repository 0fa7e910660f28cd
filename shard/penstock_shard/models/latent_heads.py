"""Multi-head latent attention in its absorbed form (DeepSeek-V2, 2024). The cache has one row per
token: its latent and its rotated key. Each head's keys and values are products of the latent c.

A head's key is W_k c, so its score q W_k c is the score of the query q W_k with the latent itself.
The weighted sum of values W_v c is W_v times the weighted sum of latents. Prompts and decodes both
use this form, because the form with each head's keys and values never gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.ops.base import Experts, Ops


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """A layer's H heads: their matrices W_k as [H, R, N], with R the latent's size and N the size
    of a query without rotation; W_v as [H, V, R].
    """

    keys: Experts
    values: Experts

    @classmethod
    def of(cls, weight: Tensor, num_heads: int, query_size: int, ops: Ops) -> LatentHeads:
        """Split weight [H * (N + V), R], the layout of `kv_b_proj`."""
        heads = weight.view(num_heads, -1, weight.shape[1])
        keys, values = heads[:, :query_size].transpose(1, 2), heads[:, query_size:]
        return cls(
            ops.pack_experts(([head] for head in keys), num_heads, exact=ops.dense_head),
            ops.pack_experts(([head] for head in values), num_heads, exact=ops.dense_head),
        )

    def absorb(self, query: Tensor) -> Tensor:
        """Map query [T, H, N + P], whose last P elements are rotated, to [T, H, R + P]."""
        size = self.keys.in_features
        latent = _by_head(self.keys, query[..., :size])
        return torch.cat((latent, query[..., size:]), dim=-1)

    def expand(self, attended: Tensor) -> Tensor:
        """Map weighted sums of latents [T, H, R] to weighted sums of values [T, H, V]."""
        return _by_head(self.values, attended)


def _by_head(matrices: Experts, x: Tensor) -> Tensor:
    """Multiply each head of x [T, H, K] by its matrix -> [T, H, N]."""
    num_tokens, num_heads, _ = x.shape
    offsets = torch.arange(num_heads + 1, dtype=torch.int32, device=x.device) * num_tokens
    rows = x.transpose(0, 1).contiguous().view(num_heads * num_tokens, -1)
    product = matrices.grouped(rows, offsets)
    return product.view(num_heads, num_tokens, -1).transpose(0, 1)
