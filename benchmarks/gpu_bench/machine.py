"""What the device itself can do: the limits that everything else is held against.

Knows tensors and clocks; nothing of models.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

_REPEATS = 20


def device_of(name: str) -> torch.device:
    return torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """The median of single runs; on a GPU by its own clock, launched back to back."""
    work()
    if device.type != "cuda":
        return statistics.median(_clocked(work) for _ in range(repeats))
    marks: list[Any] = [_mark() for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    spans = itertools.pairwise(marks)
    return statistics.median(1e-3 * float(before.elapsed_time(after)) for before, after in spans)


def _mark() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def _clocked(work: Callable[[], object]) -> float:
    before_s = time.perf_counter()
    work()
    return time.perf_counter() - before_s


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written by a large copy, a second."""
    count = 2**31 if device.type == "cuda" else 2**26
    source = torch.zeros(count, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * count / seconds_of(lambda: target.copy_(source), device)


def matmul_flops_per_s(device: torch.device) -> float:
    """Of a square product in bfloat16 (float32 on a processor)."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 512
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / seconds_of(lambda: left @ right, device)


def facts(device: torch.device) -> dict[str, Any]:
    """Of the device, the libraries and the source."""
    on_gpu = device.type == "cuda"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
