"""The device's limits, with which everything else is compared: copy rate, matmul rate, facts."""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_REPEATS = 30
# An idle GPU takes a while to reach its full clock rate.
_WARM_UP_S = 0.3


def device_of(name: str) -> torch.device:
    return torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")


def stamp(device: torch.device) -> Any:
    """Make a time stamp: on a GPU, an event after all work so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event
    made = event(enable_timing=True)
    made.record()
    return made


def spans_s(stamps: Sequence[Any], device: torch.device) -> list[float]:
    """Return the seconds from each stamp to the next."""
    pairs = itertools.pairwise(stamps)
    if device.type != "cuda":
        return [after - before for before, after in pairs]
    torch.cuda.synchronize(device)
    return [1e-3 * float(before.elapsed_time(after)) for before, after in pairs]


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Return the median seconds of a run; on a GPU by its own clock, with runs back to back."""
    work()
    if device.type == "cuda":
        until_s = time.perf_counter() + _WARM_UP_S
        while time.perf_counter() < until_s:
            work()
            torch.cuda.synchronize(device)
    stamps = [stamp(device)]
    for _ in range(repeats):
        work()
        stamps.append(stamp(device))
    return statistics.median(spans_s(stamps, device))


def recorded(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the work as one launch: on a GPU captured as a graph, which never waits for Python."""
    if device.type != "cuda":
        return work
    stream: Any = torch.cuda.Stream
    aside = stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        # Compile kernels first, because compilation cannot be captured.
        work()
    torch.cuda.current_stream(device).wait_stream(aside)
    torch.cuda.synchronize(device)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], object] = graph.replay
    return replay


def copy_bytes_per_s(device: torch.device) -> float:
    """Return the bytes that a large copy reads and writes a second."""
    count = 2**30 if device.type == "cuda" else 2**26
    source = torch.randint(
        -128, 128, (count,), dtype=torch.int8, device=device, generator=_generator(device)
    )
    target = torch.empty_like(source)
    return 2 * count / seconds_of(lambda: target.copy_(source), device)


def matmul_flops_per_s(device: torch.device) -> float:
    """Return the flops a second of a square product in bfloat16 (float32 on cpu)."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 512
    dtype = torch.bfloat16 if on_gpu else torch.float32
    generator = _generator(device)
    left = torch.randn(size, size, device=device, generator=generator).to(dtype)
    right = torch.randn(size, size, device=device, generator=generator).to(dtype)
    product = torch.empty_like(left)
    return 2 * size**3 / seconds_of(lambda: torch.mm(left, right, out=product), device)


def _generator(device: torch.device) -> torch.Generator:
    """Make a generator, because torch's default one is unusable after a failed graph capture."""
    return torch.Generator(device).manual_seed(0)


def facts(device: torch.device) -> dict[str, Any]:
    """Return facts of the device and versions of libraries."""
    found: dict[str, Any] = {"device": platform.processor() or platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = {
            "device": properties.name,
            "memory_gb": round(1e-9 * properties.total_memory, 1),
            "multiprocessors": properties.multi_processor_count,
        }
    packages = ("triton", "transformers", "tokenizers", "numpy", "grpcio", "protobuf")
    return {
        **found,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in packages},
        "python": platform.python_version(),
        "cores": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
