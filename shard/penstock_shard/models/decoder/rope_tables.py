"""Tables of rotary position embedding, from transformers' rotary modules, which implement all
scalings of frequencies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from penstock_shard.models.decoder.families import FAMILIES, transformers_module
from penstock_shard.models.decoder.spec import NO_ROTATION, DecoderSpec, NotOurs
from penstock_shard.ops.base import Rope


def rope_tables(
    config: PreTrainedConfig, spec: DecoderSpec, max_positions: int, device: torch.device
) -> dict[str, Rope]:
    """A table for each of `spec.rope_types`. Raises NotOurs if a table is too wide for
    its heads.
    """
    rotary: Any = _rotary_class(config)(config)
    positions = torch.arange(max_positions).unsqueeze(0)
    tables = {}
    for name in set(spec.rope_types):
        if name == NO_ROTATION:
            cos, sin = torch.ones(max_positions, 1), torch.zeros(max_positions, 1)
        else:
            cos, sin = _angles(rotary, positions, name)
            _check_width(spec, name, 2 * cos.shape[1])
        temperature = _temperature(config, positions[0], rotates=name != NO_ROTATION)
        tables[name] = Rope(
            cos.contiguous().to(device),
            sin.contiguous().to(device),
            None if temperature is None else temperature.to(device),
        )
    return tables


def _check_width(spec: DecoderSpec, name: str, width: int) -> None:
    """Raise NotOurs for a table wider than a head, or without the rotated width of latents."""
    for layer in spec.layers:
        room = layer.head_dim if spec.latent is None else spec.latent.rotated
        has_angles = spec.rope_types[layer.index] == name and layer.state is None
        if has_angles and (width > room or (spec.latent is not None and width < room)):
            raise NotOurs(f"rotation of {width} elements of {room}")


def _angles(rotary: Any, positions: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines [P, rotary_dim / 2] of positions [1, P] for one rope type."""
    layer_type = {"layer_type": name} if name else {}
    made = rotary(torch.empty(0, dtype=torch.float32), positions, **layer_type)
    if isinstance(made, Tensor):
        # Llama 4 returns complex numbers.
        return made[0].real, made[0].imag
    cos, sin = made[0][0], made[1][0]
    if cos.shape[1] == len(getattr(rotary, "inv_freq", ())):
        # gpt-oss returns each angle once.
        return cos, sin
    # Other modules repeat the first half in the second.
    return cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]


def _temperature(config: PreTrainedConfig, positions: Tensor, *, rotates: bool) -> Tensor | None:
    """The factor of each position's queries, which grows by steps with the position: in Ministral 3
    and Mistral 4, and in Llama 4's layers without rotation.
    """
    rope = config.rope_parameters or {}
    beta = rope.get("llama_4_scaling_beta")
    if beta is not None:
        contexts = torch.floor(positions / rope["original_max_position_embeddings"])
        return 1 + float(beta) * (1 + contexts).log()
    if getattr(config, "attn_temperature_tuning", False) and not rotates:
        stretches = torch.floor((positions.float() + 1.0) / config.floor_scale)
        return torch.log1p(stretches) * float(config.attn_scale) + 1.0
    return None


def _rotary_class(config: PreTrainedConfig) -> Any:
    family = FAMILIES[config.model_type]
    return getattr(
        transformers_module(family), f"{family.rotary_prefix or family.prefix}RotaryEmbedding"
    )
