"""What is loaded beside a text model encodes images as the whole model does."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models.tiny_vision import FAMILIES, make_vision, random_picture

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


def test_loading_one_says_nothing_of_its_own(tmp_path: Path) -> None:
    make_vision(tmp_path, "llava")
    load = (
        "import sys, torch; from pathlib import Path; from transformers import AutoConfig; "
        "from penstock_shard.checkpoint.safetensors import Checkpoint; "
        "from penstock_shard.images.tower import load_tower; path = Path(sys.argv[1]); "
        "load_tower(AutoConfig.from_pretrained(path), Checkpoint(path), "
        "torch.device('cpu'), torch.float32)"
    )
    # As a process of its own, whose logs nothing has quieted so far.
    run = subprocess.run(
        [sys.executable, "-c", load, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert (run.stdout, run.stderr) == ("", "")
