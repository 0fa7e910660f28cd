"""Serves modules of transformers whose attention has `expand_kv`. Our attention takes their latents
instead of the expanded keys and values; see `models/latent_heads.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock_shard.models.latent_heads import LatentHeads
from penstock_shard.ops.base import Ops


def latent_heads(module: PreTrainedModel, ops: Ops) -> dict[int, LatentHeads]:
    """The heads of layers with latent attention, by layer index. Call before weights are packed."""
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
    """While `is_served`, call attention with unexpanded latents: each token's key is [1, R + P],
    and its value [1, R].
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
