"""A model's image encoder: all of transformers' code except the text model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.errors import ModelError, first_line
from penstock_shard.images.features import ImageFeatures

# The vocabulary size of the text model that is made with the encoder and dropped.
_FEW = 8

# Names of the text model within models.
_TEXT_PARTS = ("language_model", "text_model")


class Tower:
    """Encodes one image per call, so that no image's bits depend on other images."""

    def __init__(self, module: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        """Keep the image encoder of a model of images and text."""
        self._module: Any = module
        self._device = device
        self._dtype = dtype
        # Patches on a side of the square that becomes one token.
        self._merge = int(getattr(module.config.vision_config, "spatial_merge_size", 1))

        # Without a separate stream, each step would wait for an image.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, Tensor]) -> ImageFeatures:
        """Encode one processed image; return features in host memory."""
        if self._stream is None:
            # With several threads, torch splits tensors into parts, and rounds differently at their
            # ends.
            torch.set_num_threads(1)
            return self._encode(inputs)
        with torch.cuda.stream(self._stream):
            return self._encode(inputs)

    def _encode(self, inputs: Mapping[str, Tensor]) -> ImageFeatures:
        placed = {
            name: value.to(self._device, self._dtype)
            if value.is_floating_point()
            else value.to(self._device)
            for name, value in inputs.items()
        }
        made = self._module.get_image_features(**placed, return_dict=True)
        deep = getattr(made, "deepstack_features", None) or ()
        return ImageFeatures(
            _rows(made.pooler_output), tuple(_rows(each) for each in deep), self.grid(inputs)
        )

    def grid(self, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
        """The features' rows and columns; (0, 0) if positions ignore them."""
        if "image_grid_thw" not in inputs:
            return (0, 0)
        _, height, width = inputs["image_grid_thw"][0].tolist()
        return (height // self._merge, width // self._merge)


def _rows(made: Tensor | tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """Join features, maybe of several tiles, into one tensor [R, H] on the host."""
    parts = [made] if isinstance(made, Tensor) else made
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).cpu()


def load_tower(
    config: PreTrainedConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> Tower:
    """Load a model's encoder. Raises ModelError if weights are missing."""
    # Otherwise transformers would report the text model's tensors as missing. Others are checked
    # below.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    maker: Any = AutoModelForImageTextToText
    small = _with_little_text(config)
    with torch.device("meta"):
        maker = type(maker.from_config(small))
    try:
        module, loading = maker.from_pretrained(
            None,
            config=small,
            state_dict=dict(checkpoint.beside_text()),
            dtype=dtype,
            output_loading_info=True,
        )
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"the image encoder cannot be loaded: {first_line(error)}") from error
    missing = sorted(name for name in loading["missing_keys"] if not _is_of_text(name))
    if missing:
        raise ModelError(
            f"the weights lack {len(missing)} of the image encoder's tensors, {missing[0]} for one"
        )
    inner: PreTrainedModel = module.model
    setattr(inner, _text_part(inner), None)
    inner.eval().requires_grad_(False)
    return Tower(inner.to(device), device, dtype)


def _text_part(inner: PreTrainedModel) -> str:
    return next(name for name in _TEXT_PARTS if hasattr(inner, name))


def _is_of_text(name: str) -> bool:
    return name.startswith("lm_head.") or any(f"{part}." in name for part in _TEXT_PARTS)


def _with_little_text(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy the configuration with an empty text model, which costs nothing to make."""
    small = copy.deepcopy(config)
    text: Any = small.get_text_config()
    text.num_hidden_layers = 0
    text.vocab_size = _FEW
    text.pad_token_id = None
    if hasattr(text, "hidden_size_per_layer_input"):
        text.hidden_size_per_layer_input = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return small
