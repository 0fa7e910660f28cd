"""The cost of images for streams on simulated GPUs.

`benchmarks/simulated_images.py` measures the same for longer.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from simulation.device_loads import Image, Load, Setting, long_prompts
from simulation.devices import H100
from simulation.encoders import Encoding

_IMAGE = Image(640, 480, 5280)
_NONE = Load(0, 100, 60, seconds=1.5, num_streams=12, stream_tokens=400)
_IMAGES = replace(_NONE, per_s=1.5, image=_IMAGE)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


def _setting(share: float | None, blocks: str, max_prefill_tokens: int = 1024) -> Setting:
    device = replace(H100, encoding=Encoding(share))
    return Setting(blocks=blocks, device=device, max_prefill_tokens=max_prefill_tokens)


def test_small_chunks_of_prompts_with_images_leave_streams_as_they_are() -> None:
    beside = _setting(None, "none", 128)
    calm, busy = (long_prompts(beside, ("both",), load) for load in (_NONE, _IMAGES))
    assert busy.first_tokens_s
    assert busy.gap_p99_s <= 1.3 * calm.gap_p99_s
    # The encoder's part where it takes half of the device.
    halves = long_prompts(_setting(0.5, "none", 128), ("both",), _IMAGES)
    assert halves.gap_p99_s > 1.8 * calm.gap_p99_s
    assert min(halves.first_tokens_s) > 2 * Encoding().seconds(_IMAGE.num_tokens)


def test_images_are_encoded_at_the_prefill_shard_alone() -> None:
    halves = _setting(0.5, "ahead")
    calm, busy = (long_prompts(halves, ("prefill", "decode"), load) for load in (_NONE, _IMAGES))
    assert busy.first_tokens_s
    assert busy.gap_p99_s <= 1.3 * calm.gap_p99_s
    # An answer does not wait for its image to be encoded where it goes.
    assert max(busy.longest_s) < Encoding().seconds(_IMAGE.num_tokens)
