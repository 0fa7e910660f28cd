"""Models with states, and models that see, on a CUDA device: their tokens are those of transformers
on cpu, and blocks that were copied to the host and back are those that were computed.

Skipped without a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models.driver import Driver, load, make_sequence
from models.image_prompts import PICTURES, ask
from models.tiny_families import generate, make_family
from models.tiny_vision import make_vision

from penstock_shard.sequence import Sequence
from penstock_shard.worker.model_runner import ModelRunner

DEVICE = "cuda"
OUTPUT_TOKENS = 10
PROMPTS = [[*range(100, 170)], [*range(300, 307)], [*range(500, 540)]]
# A multiple of the length of blocks, and of the distance of kept states.
COPIED_TOKENS = 64

pytestmark = [
    pytest.mark.gpu,
    # What a library only says on a device is not what these are about.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(autouse=True)
def _whole_float32() -> Iterator[None]:
    """torch would round inputs of encoders' convolutions to 10 bits."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


def on_device(directory: Path, **settings: object) -> ModelRunner:
    """Load a model on the device with few rows and blocks, so that several models fit."""
    limits = {"max_num_seqs": 8, "max_model_len": 512, "kv_blocks": 200, "state_spacing": 32}
    return load(directory, **{"device": DEVICE, **limits, **settings})


def outputs_of(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.token_ids[sequence.num_prompt_tokens :].tolist() for sequence in sequences]


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize(
    "family", ["mamba2", "falcon_mamba", "qwen3_next", "kimi_linear", "lfm2", "gemma4_text"]
)
def test_tokens_of_models_with_states_and_windows_are_those_of_generate(
    family: str, enforce_eager: bool, tmp_path: Path
) -> None:
    directory = make_family(tmp_path, family)
    runner = on_device(directory, enforce_eager=enforce_eager)
    sequences = [make_sequence(prompt, max_tokens=OUTPUT_TOKENS) for prompt in PROMPTS]
    Driver(runner).generate(sequences)
    assert outputs_of(sequences) == generate(directory, PROMPTS, OUTPUT_TOKENS).outputs


# With deep features and three positions, with images that see their later tokens in all layers and
# in some, and with tiles.
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "gemma4", "llava_next"])
def test_tokens_about_images_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    whole = make_vision(tmp_path, family)
    asked = [ask(tmp_path, whole, sizes, seed) for seed, sizes in enumerate(PICTURES)]
    runner = on_device(tmp_path, kv_blocks=400)
    for each in asked:
        each.put(runner)
    sequences = [each.sequence() for each in asked]
    Driver(runner).generate(sequences, max_chunk=70)
    assert outputs_of(sequences) == [each.expected for each in asked]


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v3"])
def test_a_sequence_goes_on_with_blocks_that_were_copied_to_another_cache(
    family: str, tmp_path: Path
) -> None:
    directory = make_family(tmp_path, family)
    first, second = on_device(directory), on_device(directory)
    computed, copied = (make_sequence(PROMPTS[0], max_tokens=OUTPUT_TOKENS) for _ in range(2))
    one, other = Driver(first), Driver(second, seed=1)
    one.step([(computed, COPIED_TOKENS)])
    other.reserve(copied, COPIED_TOKENS)
    for group, num_bytes in enumerate(first.info.block_bytes):
        for source, target in zip(
            one.blocks[computed][group], other.blocks[copied][group], strict=True
        ):
            data = memoryview(bytearray(num_bytes))
            first.read_block(group, source, data)
            second.write_block(group, target, data)
    copied.num_computed = COPIED_TOKENS
    one.generate([computed])
    other.generate([copied])
    assert outputs_of([copied]) == outputs_of([computed])
