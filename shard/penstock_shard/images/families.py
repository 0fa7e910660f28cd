"""The model families whose images are served, and how they differ.

`tower.py` calls all encoders alike. Routers know which tokens stand for an image
(`text/image_tokens/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_shard.checkpoint.untrusted.files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _nothing(config: Any) -> dict[str, Any]:
    return {}


def _merged_patches(config: Any) -> dict[str, Any]:
    """Return the options that resize images to multiples of a token's side."""
    return {"patch_size": config.vision_config.patch_size * config.spatial_merge_size}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    The image processor gets `options` at each call, as the family's own processor of images and
    text would pass them. If positions have three axes, `sections` are the numbers of rotary
    frequencies per axis, unless the configuration has them. With `take_turns`, successive
    frequencies belong to different axes.
    """

    options: Callable[[Any], dict[str, Any]] = _nothing
    sections: tuple[int, ...] = ()
    take_turns: bool = False


_GLM4 = Family(sections=(8, 12, 12))
_QWEN2 = Family(sections=(16, 24, 24))
_QWEN3 = Family(sections=(24, 20, 20), take_turns=True)
_QWEN35 = Family(sections=(11, 11, 10), take_turns=True)
_FAMILIES: Mapping[str, Family] = {
    "gemma3": Family(),
    "gemma4": Family(),
    "glm46v": _GLM4,
    "glm4v": _GLM4,
    "glm4v_moe": _GLM4,
    "idefics3": Family(),
    "internvl": Family(lambda config: {"crop_to_patches": True}),
    "llava": Family(),
    "llava_next": Family(),
    "mistral3": Family(_merged_patches),
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "smolvlm": Family(),
}


def type_that_sees(model_dir: Path) -> str | None:
    """The type of a model that sees images, served or not; None for other models."""
    path = model_dir / "config.json"
    config = read_object(path) if path.exists() else {}
    return str(config.get("model_type")) if isinstance(config.get("vision_config"), dict) else None


def is_served(model_type: str) -> bool:
    return model_type in _FAMILIES


def family_of(config: PreTrainedConfig) -> Family:
    return _FAMILIES[config.model_type]


def image_token_id(config: Any) -> int:
    found = getattr(config, "image_token_id", None)
    return int(config.image_token_index if found is None else found)


def axis_of_frequencies(config: PreTrainedConfig) -> tuple[int, ...]:
    """The position axis of each rotary frequency; empty if positions have one axis."""
    family, text = family_of(config), config.get_text_config()
    if not family.sections:
        return ()
    rope = text.rope_parameters or {}
    sections = rope.get("mrope_section", family.sections)
    if not family.take_turns:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    axes = [0] * (int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2)
    for axis in (1, 2):
        places = range(axis, min(len(axes), 3 * sections[axis]), 3)
        for place in places:
            axes[place] = axis
    return tuple(axes)
