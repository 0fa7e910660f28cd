"""Tiny random models of families that see images, with their image processors, and what
transformers generates with them.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models.tiny_families import tiny_config, turn_stacks
from support.budget import in_soak
from support.image_models import IMAGE_MODELS
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

# In place of an image in prompts.
IMAGE_ID = 4000
_PATCH = 14
_SIDE = 2 * _PATCH
_Family = tuple[dict[str, Any], dict[str, Any], Any]


def _in_squares(processor: Any, patch: int, most: int, **vision: Any) -> _Family:
    """Return the configuration and the processor of a family that takes images of any proportions.
    Each square of two by two patches is a token.
    """
    sizes = {"patch_size": patch, "merge_size": 2}
    square = (2 * patch) ** 2
    pixels = {"shortest_edge": 4 * square, "longest_edge": most * square}
    return (
        {"image_token_id": IMAGE_ID},
        {"patch_size": patch, "spatial_merge_size": 2, **vision},
        processor(size=pixels, **sizes),
    )


def _in_tiles(processor: Any) -> _Family:
    """Return the configuration and the processor of a family that cuts images into tiles with
    names. Each tile has four tokens.
    """
    side = 4 * _PATCH
    return (
        # `image_seq_len` is the processor's, not the model's.
        {"image_token_id": IMAGE_ID, "image_seq_len": 4},
        {"image_size": side, "patch_size": _PATCH},
        processor(size={"longest_edge": 3 * side}, max_image_size={"longest_edge": side}),
    )


_QWEN3 = _in_squares(
    Qwen2VLImageProcessorPil,
    16,
    40,
    num_position_embeddings=64,
    deepstack_visual_indexes=[0, 1],
)
# For each family: values of its configuration, those of its encoder's, and its processor.
_FAMILIES: dict[str, _Family] = {
    "llava": (
        {"image_token_index": IMAGE_ID},
        {"image_size": 4 * _PATCH, "patch_size": _PATCH},
        CLIPImageProcessorPil(
            size={"shortest_edge": 4 * _PATCH},
            crop_size={"height": 4 * _PATCH, "width": 4 * _PATCH},
        ),
    ),
    "llava_next": (
        {
            "image_token_index": IMAGE_ID,
            "image_grid_pinpoints": [[_SIDE, 2 * _SIDE], [2 * _SIDE, _SIDE], [2 * _SIDE] * 2],
        },
        {"image_size": _SIDE, "patch_size": _PATCH},
        LlavaNextImageProcessorPil(
            size={"shortest_edge": _SIDE},
            crop_size={"height": _SIDE, "width": _SIDE},
            image_grid_pinpoints=[[_SIDE, 2 * _SIDE], [2 * _SIDE, _SIDE], [2 * _SIDE] * 2],
        ),
    ),
    "pixtral": (
        {
            "image_token_index": IMAGE_ID,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {"image_size": 8 * _PATCH, "patch_size": _PATCH},
        PixtralImageProcessorPil(size={"longest_edge": 8 * _PATCH}, patch_size=_PATCH),
    ),
    "mistral3": (
        {"image_token_index": IMAGE_ID, "spatial_merge_size": 2, "vision_feature_layer": -1},
        {"image_size": 8 * _PATCH, "patch_size": _PATCH},
        PixtralImageProcessorPil(size={"longest_edge": 8 * _PATCH}, patch_size=_PATCH),
    ),
    "gemma3": (
        {"image_token_index": IMAGE_ID, "image_token_id": IMAGE_ID, "mm_tokens_per_image": 36},
        {"image_size": 12 * _PATCH, "patch_size": _PATCH},
        Gemma3ImageProcessorPil(size={"height": 12 * _PATCH, "width": 12 * _PATCH}),
    ),
    "gemma4": (
        {
            "image_token_id": IMAGE_ID,
            "boi_token_id": IMAGE_ID + 1,
            "eoi_token_id": IMAGE_ID + 2,
            "text_config": {
                "use_bidirectional_attention": "vision",
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
            },
        },
        {"patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 128},
        Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70),
    ),
    "internvl": (
        {"image_token_id": IMAGE_ID, "image_seq_length": 4, "downsample_ratio": 0.5},
        {"image_size": [4 * _PATCH] * 2, "patch_size": [_PATCH] * 2},
        GotOcr2ImageProcessorPil(size={"height": 4 * _PATCH, "width": 4 * _PATCH}),
    ),
    "qwen2_vl": _in_squares(Qwen2VLImageProcessorPil, _PATCH, 40),
    "qwen2_5_vl": _in_squares(
        Qwen2VLImageProcessorPil, _PATCH, 40, window_size=4 * _PATCH, fullatt_block_indexes=[1]
    ),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "glm4v": _in_squares(Glm4vImageProcessorPil, _PATCH, 80, image_size=8 * _PATCH),
    "glm46v": _in_squares(Glm46VImageProcessorPil, _PATCH, 80, image_size=8 * _PATCH),
    "glm4v_moe": _in_squares(Glm4vImageProcessorPil, _PATCH, 80, image_size=8 * _PATCH),
    "idefics3": _in_tiles(Idefics3ImageProcessorPil),
    "smolvlm": _in_tiles(SmolVLMImageProcessorPil),
}
# Each is computed as another is; the soak has all.
_LIKE_ANOTHER = {"pixtral", "qwen2_vl", "qwen3_5_moe", "glm46v", "glm4v_moe", "smolvlm"}
NAMES = tuple(_FAMILIES)
FAMILIES = [in_soak(name) if name in _LIKE_ANOTHER else name for name in _FAMILIES]


def _config(family: str) -> Any:
    if family == "pixtral":
        # It is of LLaVA's type, with another encoder and another text model.
        text, vision = tiny_config("mistral"), tiny_config("pixtral")
        return tiny_config("llava", text_config=text, vision_config=vision)
    return tiny_config(family)


@dataclass(frozen=True)
class Picture:
    """Pixels, RGB8 in rows."""

    width: int
    height: int
    pixels: bytes

    @property
    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(self.pixels, dtype=np.uint8).reshape(self.height, self.width, 3)


def random_picture(rng: random.Random, width: int, height: int) -> Picture:
    """Noise over a slope, so that resizing matters."""
    slope = np.add.outer(np.arange(height), np.arange(width))[:, :, None] * [1, 2, 3]
    noise = np.frombuffer(rng.randbytes(width * height * 3), dtype=np.uint8)
    mixed = (slope + noise.reshape(height, width, 3) // 4) % 256
    return Picture(width, height, mixed.astype(np.uint8).tobytes())


def make_vision(
    directory: Path,
    family: str,
    seed: int = 0,
    *,
    sizes: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
    max_pixels: int | None = None,
) -> PreTrainedModel:
    """Write a model and its processor. Returns the model, as transformers computes it. `sizes` are
    other values of its text model and its encoder.
    """
    values, vision, processor = _FAMILIES[family]
    config: Any = _config(family)
    for name, value in values.items():
        if name != "text_config":
            setattr(config, name, value)
    for part, changes in (
        (config.get_text_config(), values.get("text_config", {})),
        (config.vision_config, vision),
        (config.get_text_config(), sizes[0]),
        (config.vision_config, sizes[1]),
    ):
        for name, value in changes.items():
            if hasattr(part, name):
                setattr(part, name, value)
    if sizes[0] and hasattr(config.vision_config, "out_hidden_size"):
        config.vision_config.out_hidden_size = config.get_text_config().hidden_size
    if max_pixels is not None:
        processor = copy.deepcopy(processor)
        processor.size["longest_edge"] = max_pixels
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5 * (0.2 if "embed" in name else 1))
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    model.eval().save_pretrained(directory)
    processor.save_pretrained(directory)
    if family == "qwen3_vl_moe":
        turn_stacks(directory)
    return model


def generate(
    model: Any, token_ids: Sequence[int], inputs: dict[str, Any], num_tokens: int
) -> list[int]:
    """Greedy tokens after a prompt with images, by transformers."""
    ids = torch.tensor([list(token_ids)])
    name = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
    if model.config.model_type in ("gemma3", "gemma4") or "image_grid_thw" in inputs:
        inputs = {**inputs, name: (ids == model.config.image_token_id).long()}
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **inputs,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made[0, ids.shape[1] :].tolist()


def make_whole_vision(
    directory: Path, family: str, text: dict[str, Any] | None = None
) -> PreTrainedModel:
    """A model with a tokenizer and a chat template of its family. Returns it, with its ids. `text`
    are other values of its decoder.
    """
    model: Any = make_vision(directory, family, sizes=(text or {}, {}))
    described = IMAGE_MODELS[family]
    tokenizer = described.tokenizer()
    for name, data in described.files().items():
        if name.startswith("tokenizer"):
            (directory / name).write_bytes(data)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    ids = {"image_token_id": described.token} | described.tokens_of_ids
    ids = {name: token for name, token in ids.items() if name in config}
    ids |= {"image_token_index": described.token} if "image_token_index" in config else {}
    for name, token in ids.items():
        config[name] = tokenizer.token_to_id(token)
        setattr(model.config, name, config[name])
    path.write_text(json.dumps(config))
    if described.processor:
        processor = {**described.processor}
        for name in ("patch_size", "spatial_merge_size", "image_seq_length", "image_seq_len"):
            own = getattr(model.config, name, None) or getattr(
                model.config.vision_config, name, None
            )
            if name in processor and own is not None:
                processor[name] = own
        if family == "gemma3":
            processor["image_seq_length"] = model.config.mm_tokens_per_image
        (directory / "processor_config.json").write_text(json.dumps(processor))
    return model
