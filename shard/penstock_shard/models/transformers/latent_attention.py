"""Multi-head latent attention in its absorbed form: what is cached of a token is one row, its
latent and its rotated key; each head's keys and values are products of these (DeepSeek-V2, 2024).

A head's key is W_k c, so its score q W_k c is that of the query q W_k with the latent c itself; and
the weighted sum of its values W_v c is W_v times the weighted sum of latents. The same form serves
prompts and decodes: the other one, with keys and values of each head, is never equal bit for bit.

Modules of transformers whose attention has `expand_kv` are served this way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

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
            ops.pack_experts(([head] for head in keys), num_heads),
            ops.pack_experts(([head] for head in values), num_heads),
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


def latent_heads(module: PreTrainedModel, ops: Ops) -> dict[int, LatentHeads]:
    """The heads of the module's layers with latent attention, by index. Call it before weights are
    packed.
    """
    return {
        int(layer.layer_idx): LatentHeads.of(
            layer.kv_b_proj.weight,
            layer.kv_b_proj.weight.shape[0] // (layer.qk_nope_head_dim + layer.v_head_dim),
            layer.qk_nope_head_dim,
            ops,
        )
        for layer in _latent_layers(module)
    }


def keep_latents(module: PreTrainedModel, is_served: Callable[[], bool]) -> None:
    """While `is_served`, have attention called with latents as they are: each token's [1, R + P] as
    its key, and [1, R] as its value.
    """
    for layer in _latent_layers(module):
        layer.expand_kv = _expansion(layer.expand_kv, is_served)


def _expansion(
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], is_served: Callable[[], bool]
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def expand_kv(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        if is_served():
            return torch.cat((latent, rotated), dim=-1), latent
        return expand(latent, rotated)

    return expand_kv


def _latent_layers(module: PreTrainedModel) -> list[Any]:
    return [each for each in module.modules() if hasattr(each, "expand_kv")]
