"""Questions about a GPU's memory, with a stand-in for torch's count and the driver's."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from penstock_shard.device.gpu_memory import PeakMemory, free_bytes, used_bytes
from penstock_shard.images.features import ImageFeatures
from penstock_shard.images.image_encoder import ImageEncoder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Gpu:
    """A GPU of 100 bytes: what tensors take, what they took at most, what torch keeps for later,
    and what others take.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken, self.peak, self.kept, self.others = 20, 60, 30, 10
        for name, function in {
            "synchronize": lambda device: None,
            "reset_peak_memory_stats": self.reset,
            "memory_allocated": lambda device: self.taken,
            "max_memory_allocated": lambda device: self.peak,
            "empty_cache": self.empty,
            "mem_get_info": lambda device: (100 - self.taken - self.kept - self.others, 100),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def reset(self, device: torch.device) -> None:
        self.peak = self.taken

    def empty(self) -> None:
        self.kept = 0


def test_what_work_takes_at_most_is_counted_from_when_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)
    peak = PeakMemory(CUDA)
    assert peak.extra_bytes() == 0
    gpu.peak = 55
    assert peak.extra_bytes() == 35


def test_what_torch_keeps_for_later_is_free_and_what_others_take_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Gpu(monkeypatch)
    assert free_bytes(CUDA, 0.9) == 90 - 30
    Gpu(monkeypatch)
    assert used_bytes(CUDA) == 30


class Eyes:
    """A processor and an encoder, which needs memory for the size of an image."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def process(self, pixels: bytes, width: int, height: int) -> dict[str, torch.Tensor]:
        assert len(pixels) == 3 * width * height
        return {"size": torch.tensor([width, height])}

    def encode(self, inputs: Mapping[str, torch.Tensor]) -> ImageFeatures:
        self.gpu.peak = max(self.gpu.peak, self.gpu.taken + int(inputs["size"][0]) // 100)
        return ImageFeatures(torch.zeros(1, 1), (), (0, 0))

    def grid(self, inputs: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        return (0, 0)


def test_what_a_large_image_takes_at_most_is_asked_of_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eyes = Eyes(Gpu(monkeypatch))
    images = ImageEncoder(eyes, eyes, token_id=3, cache_bytes=1)
    assert images.peak_bytes(CPU) == 0
    assert images.peak_bytes(CUDA) == 40


def test_a_cpu_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "memory_allocated", "max_memory_allocated", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a cpu was asked"))
    assert PeakMemory(CPU).extra_bytes() == 0
    assert used_bytes(CPU) == 0
