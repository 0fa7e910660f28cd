"""Turns pixels into an encoder's inputs, with the checkpoint's processor in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoImageProcessor

from penstock_shard.errors import ModelError, first_line, library_faults

# The largest sizes in a processor's settings, in pixels: of a side, and of an image. In families
# that merge patches, `_edge` fields mean the image. No model has such sizes; an image of these
# takes a second.
_MOST_SIDE = 4096
_MOST_PIXELS = 2**26


class ImageProcessor:
    """Resizes, cuts and normalizes one image at a time. Thread-safe."""

    def __init__(self, model_dir: Path, options: Mapping[str, Any]) -> None:
        """Load the processor; each call passes `options`. Raises ModelError if transformers finds
        none.
        """
        self._options = dict(options)
        try:
            # transformers has two backends for most families. This one needs only Pillow, and gives
            # the same numbers on every machine.
            self._processor: Any = AutoImageProcessor.from_pretrained(
                model_dir, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except library_faults() as error:
            raise ModelError(f"{model_dir}: no image processor: {first_line(error)}") from error
        _check_sizes(model_dir, self._processor.to_dict())

    def process(self, pixels: bytes, width: int, height: int) -> Mapping[str, Tensor]:
        """Make the encoder's inputs, float32 or int64. Pixels are RGB8, row by row."""
        image = np.frombuffer(pixels, dtype=np.uint8).reshape(height, width, 3)
        made = self._processor(
            images=[image],
            input_data_format="channels_last",
            return_tensors="np",
            **self._options,
        )
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in made.items()}


def _check_sizes(model_dir: Path, settings: Mapping[str, Any]) -> None:
    """Raise ModelError, with field, value and bound, for sides that no model has."""
    counts_pixels = settings.get("merge_size") is not None
    for field in ("size", "crop_size"):
        sizes = settings.get(field)
        for name, value in sizes.items() if isinstance(sizes, Mapping) else ():
            is_count = counts_pixels and name.endswith("_edge")
            most = _MOST_PIXELS if is_count else _MOST_SIDE
            if isinstance(value, int | float) and not 0 < value <= most:
                raise ModelError(
                    f"{model_dir}: image processor: {field}.{name} {value:g} is not within 1 "
                    f"and {most}"
                )
