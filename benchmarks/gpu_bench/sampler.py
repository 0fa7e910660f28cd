"""The time of sampling for rows of logits, by their parameters.

Logits are flat, as with random weights, or peaked, as with a trained model.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_bench.attempts import Attempts
from benchmarks.gpu_bench.goals import Row
from benchmarks.gpu_bench.machine import copy_bytes_per_s, device_of
from penstock_proto.types import EngineSampling
from penstock_shard.selfcheck.random_steps import RandomSequence, in_slot
from penstock_shard.worker.logits_processors.order import every_processor
from penstock_shard.worker.sampling.sampler import Sampler, SampleRows

_PARAMETERS = {
    "greedy": EngineSampling(temperature=0.0),
    "temperature": EngineSampling(),
    "min_p": EngineSampling(min_p=0.05),
    "top_p": EngineSampling(top_p=0.95),
    "top_k, top_p": EngineSampling(top_k=20, top_p=0.8),
}
_SPREADS = {"flat": 0.5, "peaked": 4.0}
_WARM_UP, _TIMED = 2, 8
# The expected rate of reading logits, as a share of a copy's.
_READ_SHARE = 0.9


def attempts(batches: Sequence[int], vocabulary: int, device_name: str) -> Attempts:
    """Return an attempt for each number of rows, kind of logits and kind of parameters."""
    device = device_of(device_name)
    return {
        f"{count} rows, {spread}, {parameters}": partial(
            _timed, device, count, vocabulary, spread, parameters
        )
        for count in batches
        for spread in _SPREADS
        for parameters in _PARAMETERS
    }


@functools.cache
def _read_bytes_per_s(device: torch.device) -> float:
    return _READ_SHARE * copy_bytes_per_s(device)


@torch.inference_mode()
def _timed(device: torch.device, count: int, vocabulary: int, spread: str, parameters: str) -> Row:
    """Return the median time until tokens are drawn, and the host's part."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(count)
    logits = torch.randn(count, vocabulary, device=device, generator=generator)
    logits = (logits * _SPREADS[spread]).to(dtype)
    sampler = Sampler(every_processor())
    for slot in range(count):
        sampler.admit(in_slot(slot, RandomSequence([0], []), _PARAMETERS[parameters]))
    times = [_draw(sampler, logits, position) for position in range(_WARM_UP + _TIMED)]
    whole_s, host_s = (statistics.median(each) for each in zip(*times[_WARM_UP:], strict=True))
    num_bytes = count * vocabulary * dtype.itemsize
    return {
        "what": "sampling",
        "batch": count,
        "logits": spread,
        "parameters": parameters,
        "ms": 1e3 * whole_s,
        "host_ms": 1e3 * host_s,
        # For reading logits once.
        "floor_ms": 1e3 * num_bytes / _read_bytes_per_s(device),
    }


def _draw(sampler: Sampler, logits: Tensor, position: int) -> tuple[float, float]:
    """Sample once. Returns the seconds until everything is done, and is launched."""
    slots = np.arange(len(logits))
    _wait(logits.device)
    before_s = time.perf_counter()
    sampler.enqueue(logits, SampleRows(slots, np.full_like(slots, position)))
    launched_s = time.perf_counter() - before_s
    _wait(logits.device)
    return time.perf_counter() - before_s, launched_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
