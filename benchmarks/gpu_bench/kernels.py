"""The device's time in a step by kernel, from torch's profiler.

It shows what to make faster, not how fast it is: profiled steps take longer, and maybe later steps
too, so nothing is timed after this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_bench.shapes import Variant
from benchmarks.gpu_bench.steps import Sequences, compute_prompt
from penstock_shard.worker.model_runner import ModelRunner

_STEPS = 5
# The most kernels in a row of figures.
_MOST = 12
_LONGEST_NAME = 120


def decode_kernels(
    runner: ModelRunner, variant: Variant, batches: Sequence[int], context: int
) -> Iterator[dict[str, Any]]:
    """Yield the kernels of a decode step, for each batch size."""
    for count in batches:
        sequences = Sequences(runner, count, context, 2 * _STEPS + 1)

        def step(sequences: Sequences = sequences) -> None:
            sequences.launch()
            sequences.collect()

        found = _kernels(step, runner.model.device)
        sequences.end()
        yield {
            "what": "kernels",
            "model": variant.label,
            "step": f"decode, batch {count}, context {context}",
            "kernels": found,
        }


def prompt_kernels(runner: ModelRunner, variant: Variant, length: int) -> dict[str, Any]:
    """Return the kernels of a prompt that one step computes."""
    return {
        "what": "kernels",
        "model": variant.label,
        "step": f"prefill of {length}",
        "kernels": _kernels(lambda: compute_prompt(runner, length), runner.model.device),
    }


def _kernels(step: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Return each kernel's microseconds and launches in a step, the longest first."""
    on_gpu = device.type == "cuda"
    for _ in range(_STEPS):
        step()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as watched:
        for _ in range(_STEPS):
            step()
    found = [
        {
            "name": event.key[:_LONGEST_NAME],
            "us": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / _STEPS,
            "launches": event.count / _STEPS,
        }
        for event in watched.key_averages()
    ]
    found = [kernel for kernel in found if kernel["us"] > 0]
    return sorted(found, key=lambda kernel: kernel["us"], reverse=True)[:_MOST]
