"""Serves attention in which an indexer selects each query's keys (DeepSeek Sparse Attention, 2025;
MiniMax M3 selects whole blocks), up to the length at which selection begins: below it, queries see
all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

LAYER_TYPES = {"indexed_attention", "minimax_m3_sparse"}
# Models whose indexers select `index_topk` single keys per query, and those that select whole
# blocks.
_SELECT_KEYS = {"deepseek_v32", "glm_moe_dsa", "hy_v4"}
_SELECT_BLOCKS = {"minimax_m3_vl_text"}


def most_unselected_tokens(text: PreTrainedConfig) -> int | None:
    """The longest length at which every query sees all keys; None for models without these
    indexers.
    """
    if text.model_type in _SELECT_KEYS:
        return int(text.index_topk)
    if text.model_type in _SELECT_BLOCKS:
        return int(text.index_topk_blocks * text.index_block_size)
    return None


def skip_selection(module: PreTrainedModel, is_served: Callable[[], bool]) -> None:
    """While `is_served`, indexers compute nothing, because nothing reads their selection."""
    for layer in module.modules():
        indexer: Any = getattr(layer, "indexer", None)
        if indexer is not None:
            indexer.forward = _selection(indexer.forward, is_served)


def _selection(select: Callable[..., Tensor], is_served: Callable[[], bool]) -> Callable[..., Any]:
    def forward(hidden: Tensor, *args: Any, **named: Any) -> Tensor:
        if is_served():
            return torch.empty(0, dtype=torch.int32, device=hidden.device)
        return select(hidden, *args, **named)

    return forward
