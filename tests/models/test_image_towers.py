"""Towers that are loaded beside a text model: they encode images as the whole model does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from models.tiny_vision import FAMILIES, make_vision, random_picture
from transformers.utils import logging as transformers_logging

from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.images.families import family_of
from penstock_shard.images.image_processor import ImageProcessor
from penstock_shard.images.tower import load_tower
from penstock_shard.model_loader.transformers_loader import load_config

SIZES = ((60, 60), (100, 30), (57, 131), (300, 200))


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_the_whole_model_bit_for_bit(family: str, tmp_path: Path) -> None:
    whole = make_vision(tmp_path, family)
    config = load_config(tmp_path, trust_remote_code=False)
    tower = load_tower(config, Checkpoint(tmp_path), torch.device("cpu"), torch.float32)
    processor = ImageProcessor(tmp_path, family_of(config).options(config))
    for width, height in SIZES:
        picture = random_picture(random.Random(width), width, height)
        inputs = processor.process(picture.pixels, width, height)
        with torch.inference_mode():
            made = whole.model.get_image_features(**inputs, return_dict=True)
        expected = made.pooler_output
        if not isinstance(expected, torch.Tensor):
            expected = torch.cat(list(expected))
        found = tower.encode(inputs)
        assert torch.equal(found.rows, expected.reshape(-1, expected.shape[-1]))
        assert found.rows.shape[1] == config.get_text_config().hidden_size


def test_loading_one_says_nothing_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    make_vision(tmp_path, "llava")
    # As where nothing has quieted it so far.
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_progress_bar()
    capfd.readouterr()
    caplog.clear()
    config = load_config(tmp_path, trust_remote_code=False)
    load_tower(config, Checkpoint(tmp_path), torch.device("cpu"), torch.float32)
    assert (*capfd.readouterr(), caplog.records) == ("", "", [])
