"""What a configuration says of a layer's attention that the layer's attention call does not.

transformers puts it into masks, caches and values that it hands from layer to layer, none of which
reach an attention function.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig


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
