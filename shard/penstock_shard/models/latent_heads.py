"""Multi-head latent attention in its absorbed form: what is cached of a token is one row, its
latent and its rotated key; each head's keys and values are products of these (DeepSeek-V2, 2024).

A head's key is W_k c, so its score q W_k c is that of the query q W_k with the latent c itself; and
the weighted sum of its values W_v c is W_v times the weighted sum of latents. The same form serves
prompts and decodes: the other one, with keys and values of each head, is never equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.ops.base import Experts, Ops


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The H heads of a layer: their matrices W_k as [H, R, N], R the latent's size and N that of a
    query without rotation; W_v as [H, V, R].
    """

    keys: Experts
    values: Experts

    @classmethod
    def of(cls, weight: Tensor, num_heads: int, query_size: int, ops: Ops) -> LatentHeads:
        """weight [H * (N + V), R], as `kv_b_proj` has it."""
        heads = weight.view(num_heads, -1, weight.shape[1])
        keys, values = heads[:, :query_size].transpose(1, 2), heads[:, query_size:]
        return cls(
            ops.pack_experts(([head] for head in keys), num_heads, exact=ops.dense_head),
            ops.pack_experts(([head] for head in values), num_heads, exact=ops.dense_head),
        )

    def absorb(self, query: Tensor) -> Tensor:
        """query [T, H, N + P], its last P elements rotated -> [T, H, R + P]."""
        size = self.keys.in_features
        latent = _by_head(self.keys, query[..., :size])
        return torch.cat((latent, query[..., size:]), dim=-1)

    def expand(self, attended: Tensor) -> Tensor:
        """Weighted sums of latents [T, H, R] -> those of values [T, H, V]."""
        return _by_head(self.values, attended)


def _by_head(matrices: Experts, x: Tensor) -> Tensor:
    """x [T, H, K] -> each head times its matrix, [T, H, N]."""
    num_tokens, num_heads, _ = x.shape
    offsets = torch.arange(num_heads + 1, dtype=torch.int32, device=x.device) * num_tokens
    rows = x.transpose(0, 1).contiguous().view(num_heads * num_tokens, -1)
    product = matrices.grouped(rows, offsets)
    return product.view(num_heads, num_tokens, -1).transpose(0, 1)
