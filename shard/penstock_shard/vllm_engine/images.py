"""Images in prompts for vLLM's core: makes the encoder's inputs from the server's pixels.

Instead of vLLM's processor of images and text, this uses the checkpoint's processor in
transformers, like penstock's own engine. The router sends the token ids.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import PromptImage
from penstock_shard.config import ShardConfig
from penstock_shard.device.background import lower_priority
from penstock_shard.errors import ImageUnusable
from penstock_shard.images.families import image_token_id, type_that_sees
from penstock_shard.ipc.messages import Inbox

# Types of models whose images are served.
_SERVED = ("qwen2_vl",)

# Makes the encoder's tensors, by name, from RGB8 pixels, width and height.
_Process = Callable[[bytes, int, int], Mapping[str, Any]]
# Makes the prompt's fields, except token ids, from the tensors of a request's images.
_Join = Callable[[EngineRequest, Sequence[Mapping[str, Any]]], dict[str, Any]]


def serves_images(
    config: ShardConfig, model_dir: Path, *, is_tried: bool, progress: Callable[[str], None]
) -> bool | None:
    """Tell whether the model's images are served, which needs a tried version of vLLM; None for a
    model without images. `progress` gets the reason why images are not served.
    """
    model_type = type_that_sees(model_dir)
    if model_type is None or config.image_cache_bytes == 0:
        return None if model_type is None else False
    if model_type not in _SERVED:
        why = f"--engine vllm serves those of models of type {', '.join(_SERVED)}, not {model_type}"
    elif config.exact:
        why = "vLLM encodes those of several requests at once, and --exact promises equal bits"
    elif not is_tried:
        why = "this version of vLLM was not tried"
    else:
        return True
    progress(f"its images are not served: {why}")
    return False


class PromptImages:
    """Puts images into prompts, in one thread of low priority."""

    def __init__(self, process: _Process, join: _Join, token_id: int, merge_size: int) -> None:
        """A `token_id` stands for `merge_size` x `merge_size` patches."""
        self._process = process
        self._join = join
        self._token_id = token_id
        self._patches = merge_size**2
        # Incomplete images, by the number of the transfer.
        self._parts: dict[int, bytearray] = {}
        # Pixels by digest. The server bounds their number, and drops none that live requests need.
        self._pixels: dict[bytes, bytes] = {}
        self._thread = ThreadPoolExecutor(1, "images", initializer=lower_priority)

    def take(self, message: Inbox) -> None:
        for piece in message.image_pieces:
            if not piece.num_bytes:
                self._parts.pop(piece.number, None)
            elif piece.digest:
                self._pixels[piece.digest] = bytes(self._parts.pop(piece.number, b""))
            else:
                self._parts.setdefault(piece.number, bytearray()).extend(piece.data)
        for drop in message.image_drops:
            self._pixels.pop(drop.digest, None)

    async def put_into(self, prompt: dict[str, Any], request: EngineRequest) -> dict[str, Any]:
        """Return the prompt with the request's images. Raises ImageUnusable, which names one."""
        made = []
        for index, image in enumerate(request.images):
            pixels = self._pixels.get(image.digest)
            try:
                if pixels is None:
                    raise ImageUnusable("its pixels are not here any more")
                given = asyncio.get_running_loop().run_in_executor(
                    self._thread, self._fields, request, image, pixels
                )
                made.append(await given)
            except ImageUnusable as error:
                raise ImageUnusable(f"images[{index}]: {error}") from error
        return {**prompt, "type": "multimodal", **self._join(request, made)}

    def _fields(
        self, request: EngineRequest, image: PromptImage, pixels: bytes
    ) -> Mapping[str, Any]:
        """Prepare an image for the encoder; check the number of its ids in the prompt."""
        try:
            fields = self._process(pixels, image.width, image.height)
        except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ImageUnusable(f"it cannot be encoded: {type(error).__name__}") from error
        num_rows = int(fields["image_grid_thw"].prod()) // self._patches
        place = np.frombuffer(request.prompt, "<u4", image.num_tokens, 4 * image.offset)
        given = int((place == self._token_id).sum())
        if not given == num_rows == image.num_tokens:
            raise ImageUnusable(
                f"{given} of its {image.num_tokens} tokens have the id for images; the encoder "
                f"makes {num_rows} rows of {image.width}x{image.height} pixels, and vLLM takes no "
                "other tokens in their place"
            )
        return fields


def prompt_images(model_dir: Path, given: Any) -> PromptImages:
    """Make `PromptImages` for vLLM's configuration `given`. Raises ModelError."""
    # This import needs torch and transformers, as vLLM does.
    from penstock_shard.images.image_processor import ImageProcessor

    model = given.model_config.hf_config
    processor = ImageProcessor(model_dir, {})
    join = _join_with(given.model_config.dtype)
    size = model.vision_config.spatial_merge_size
    return PromptImages(processor.process, join, image_token_id(model), size)


def _join_with(dtype: Any) -> _Join:
    """Return a `_Join` that makes tensors with numbers of `dtype`."""
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    def item(fields: Mapping[str, Any]) -> Any:
        grid = fields["image_grid_thw"]
        tensors: Any = {"pixel_values": fields["pixel_values"].to(dtype), "image_grid_thw": grid}
        kinds = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        return MultiModalKwargsItems.from_hf_inputs(tensors, kinds)["image"][0]

    def join(request: EngineRequest, made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        images = request.images
        places = [PlaceholderRange(offset=each.offset, length=each.num_tokens) for each in images]
        return {
            "mm_kwargs": MultiModalKwargsItems({"image": [item(fields) for fields in made]}),
            "mm_hashes": {"image": [_name(image, request.cache_salt) for image in images]},
            "mm_placeholders": {"image": places},
        }

    return join


def _name(image: PromptImage, salt: str) -> str:
    """Return an image's name for vLLM, which differs between salts."""
    return hashlib.sha256(image.digest + salt.encode()).hexdigest()
