"""What a configuration says of a layer's attention that the layer's attention call does not.

transformers puts it into masks, caches and values that it hands from layer to layer, none of which
reach an attention function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig


def attention_chunk(text: PreTrainedConfig, index: int) -> int | None:
    """Tokens of a chunk, if the layer sees no keys of earlier ones."""
    types = getattr(text, "layer_types", None) or ()
    is_chunked = index < len(types) and types[index] == "chunked_attention"
    return int(text.attention_chunk_size) if is_chunked else None


def source_of_keys(text: PreTrainedConfig, index: int) -> int | None:
    """The layer whose keys and values this one reads, if it has none of its own: the last before
    it of its type that keeps them for others.
    """
    modes: Sequence[str | None] = getattr(text, "kv_sharing_modes", None) or ()
    if index >= len(modes) or modes[index] != "reuse":
        return None
    return max(
        earlier
        for earlier in range(index)
        if modes[earlier] == "store" and text.layer_types[earlier] == text.layer_types[index]
    )


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries of later positions are larger: by log(1 + floor((position + 1) / floor)) * scale."""

    floor: float
    scale: float

    def scales(self, positions: Tensor) -> Tensor:
        """positions int64 [T] -> float32 [T, 1, 1]"""
        steps = torch.floor((positions.float() + 1.0) / self.floor)
        return (torch.log1p(steps) * self.scale + 1.0).view(-1, 1, 1)


def temperature_of(text: PreTrainedConfig, index: int) -> Temperature | None:
    """The temperature of a layer's queries, where its code counts positions from the first token
    of the input and not by `position_ids`: in Llama 4's layers without rotation.
    """
    if text.model_type != "llama4_text" or not text.attn_temperature_tuning:
        return None
    if text.no_rope_layers[index]:
        return None
    return Temperature(float(text.floor_scale), float(text.attn_scale))


def config_of_layer(text: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """The layer's own configuration where layers differ, else the one of all."""
    if getattr(text, "per_layer_attributes", None):
        own: PreTrainedConfig = text.per_layer_config[index]
        return own
    return text


def each_layer(text: PreTrainedConfig) -> Sequence[PreTrainedConfig]:
    """The configuration of each layer where layers differ, else the one of all."""
    if getattr(text, "per_layer_attributes", None):
        return list(text.per_layer_config)
    return [text]
