"""Which families' images are served, and what each asks of its image processor.

Their encoders are called alike (`tower.py`), and what stands for an image in a prompt is a router's
to know (`text/image_tokens/` there).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_shard.checkpoint.weight_files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_Options = Callable[[Any], dict[str, Any]]


def _nothing(config: Any) -> dict[str, Any]:
    return {}


def _merged_patches(config: Any) -> dict[str, Any]:
    """Sizes are multiples of what becomes one token."""
    return {"patch_size": config.vision_config.patch_size * config.spatial_merge_size}


# By the model's type: what its processor of images and text tells that of images.
_FAMILIES: Mapping[str, _Options] = {
    "llava_next": _nothing,
    "mistral3": _merged_patches,
    "internvl": lambda config: {"crop_to_patches": True},
}


def sees_images(model_dir: Path) -> bool:
    """Whether images are served of a model."""
    path = model_dir / "config.json"
    return path.exists() and read_object(path).get("model_type") in _FAMILIES


def processor_options(config: PreTrainedConfig) -> dict[str, Any]:
    """What the image processor is told at each call."""
    return _FAMILIES[config.model_type](config)


def image_token_id(config: Any) -> int:
    """The id in whose places features stand."""
    found = getattr(config, "image_token_id", None)
    return int(config.image_token_index if found is None else found)
