"""Loads a model's image encoder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from penstock_shard.checkpoint.quantization_config import plain_config
from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.images.families import axis_of_frequencies, family_of, image_token_id
from penstock_shard.images.image_encoder import ImageEncoder
from penstock_shard.images.image_processor import ImageProcessor
from penstock_shard.images.tower import load_tower


def load_encoder(model_dir: Path, device: torch.device, cache_bytes: int) -> ImageEncoder:
    """Raises ModelError if files are missing."""
    # Encoders are not quantized, even if their text models are. Without `trust_remote_code`
    # transformers would ask at the terminal.
    config = plain_config(
        AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    )
    # On a cpu torch computes 2-byte products more slowly, if at all.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tower = load_tower(config, Checkpoint(model_dir), device, dtype)
    processor = ImageProcessor(model_dir, family_of(config).options(config))
    axes = axis_of_frequencies(config)
    return ImageEncoder(processor, tower, image_token_id(config), cache_bytes, axes)
