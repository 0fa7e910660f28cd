"""What a GPU is asked about its memory, with a stand-in for torch's count and the driver's."""

from __future__ import annotations

import pytest
import torch

from penstock_shard.device.gpu_memory import PeakMemory, free_bytes, used_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Gpu:
    """Of 100 bytes: what tensors take, what they took at most, and what torch keeps for later."""

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


def test_a_cpu_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "memory_allocated", "max_memory_allocated", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a cpu was asked"))
    assert PeakMemory(CPU).extra_bytes() == 0
    assert used_bytes(CPU) == 0
