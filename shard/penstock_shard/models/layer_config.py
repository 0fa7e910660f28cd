"""Facts about a layer's attention that only its configuration states.

transformers puts them into masks, caches and values passed between layers, which never reach an
attention function.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig


def source_of_keys(text: PreTrainedConfig, index: int) -> int | None:
    """Return the layer whose keys and values this one reads: the last earlier one of the same type
    that keeps its keys for others. None if it has its own.
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
    """The layer's own configuration if layers differ, else the common one."""
    if getattr(text, "per_layer_attributes", None):
        own: PreTrainedConfig = text.per_layer_config[index]
        return own
    return text


def each_layer(text: PreTrainedConfig) -> Sequence[PreTrainedConfig]:
    """Return each layer's configuration if layers differ, else the common one."""
    if getattr(text, "per_layer_attributes", None):
        return list(text.per_layer_config)
    return [text]
