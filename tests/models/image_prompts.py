"""Prompts with images for tiny models, and what transformers answers."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models.driver import make_sequence
from models.tiny_vision import Picture, generate, random_picture

from penstock_common.image_digest import image_digest
from penstock_proto.types import PromptImage
from penstock_shard.images.families import family_of
from penstock_shard.images.image_processor import ImageProcessor
from penstock_shard.model_loader.transformers_loader import load_config
from penstock_shard.sequence import Sequence
from penstock_shard.worker.model_runner import ModelRunner

OUTPUT_TOKENS = 12
# Odd sizes of one to four images.
PICTURES = (((60, 60),), ((100, 30), (57, 131)), ((300, 200), (31, 90), (64, 64), (45, 120)))

# What processors say of an image besides, which models are not given.
_COUNTS = {"num_patches", "num_crops", "num_soft_tokens_per_image"}


@dataclass(frozen=True)
class Asked:
    """A prompt with images, and what transformers answers."""

    token_ids: list[int]
    pictures: Seq[Picture]
    placed: tuple[PromptImage, ...]
    expected: list[int]

    def sequence(self, **fields: Any) -> Sequence:
        return make_sequence(self.token_ids, max_tokens=OUTPUT_TOKENS, images=self.placed, **fields)

    def put(self, runner: ModelRunner) -> None:
        """Have the runner know the pixels."""
        assert runner.images is not None
        for picture, image in zip(self.pictures, self.placed, strict=True):
            runner.images.put(image.digest, picture.pixels)


def ask(
    directory: Path,
    whole: Any,
    sizes: Seq[tuple[int, int]],
    seed: int,
    num_tokens: int = OUTPUT_TOKENS,
    *,
    words: range = range(5, 3900),
) -> Asked:
    """Images between words, of these ids, and the answer of the whole model."""
    rng = random.Random(seed)
    config = load_config(directory, trust_remote_code=False)
    processor = ImageProcessor(directory, family_of(config).options(config))
    image_id = getattr(config, "image_token_id", None) or config.image_token_index
    pictures = [random_picture(rng, *size) for size in sizes]
    token_ids, placed, inputs = [1], [], []
    for picture in pictures:
        token_ids += [rng.choice(words) for _ in range(rng.randint(1, 9))]
        inputs.append(processor.process(picture.pixels, picture.width, picture.height))
        with torch.inference_mode():
            made = whole.model.get_image_features(**inputs[-1], return_dict=True).pooler_output
        rows = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in made)
        digest = image_digest(picture.width, picture.height, picture.pixels)
        placed.append(
            PromptImage(digest.hex(), picture.width, picture.height, len(token_ids), rows)
        )
        token_ids += [image_id] * rows
    token_ids += [rng.choice(words) for _ in range(5)]
    expected = generate(whole, token_ids, together(inputs), num_tokens)
    return Asked(token_ids, pictures, tuple(placed), expected)


def together(inputs: Seq[Any]) -> dict[str, torch.Tensor]:
    """Join the inputs of all images, as a processor gives them for all at once. Tiles are padded to
    the size of the largest input.
    """
    together = {}
    for name in inputs[0].keys() - _COUNTS:
        parts = [each[name] for each in inputs]
        if parts[0].dim() > 3:
            most = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
            parts = [_padded(part, most) for part in parts]
        together[name] = torch.cat(parts)
    return together


def _padded(part: torch.Tensor, shape: Seq[int]) -> torch.Tensor:
    padded = part.new_zeros([part.shape[0], *shape[1:]])
    padded[tuple(slice(size) for size in part.shape)] = part
    return padded
