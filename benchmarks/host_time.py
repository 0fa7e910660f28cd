"""Measures a step on the host, by kind of row: the engine with a model that computes nothing.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --rows 256 --steps 400

The logits exist already, so a step is scheduling, inputs, sampling on the cpu (with a small
vocabulary of 128 ids) and handling results. Prints medians over steady decode steps, in
microseconds. To compare two checkouts, run each in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.engines import runner_info

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.models.base import ForwardOutput
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.worker.logits_processors.order import every_processor
from penstock_shard.worker.model_runner import ModelRunner

_VOCABULARY = 128
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"sampling": {"temperature": 0.0}},
    "drawn": {"sampling": {"temperature": 1.0, "seed": 7}},
    "filtered": {"sampling": {"temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9}},
    "penalties": {"sampling": {"temperature": 0.0, "frequency_penalty": 0.5}},
    "log-probabilities": {"sampling": {"temperature": 0.0}, "logprobs": 2},
}


class _NoModel:
    """Returns the same logits at each position."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._logits = torch.randn(4096, _VOCABULARY, generator=generator)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: object,
        logit_rows: Tensor,
        hidden_rows: Tensor | None = None,
        adapters: Tensor | None = None,
        images: object = None,
    ) -> ForwardOutput:
        return ForwardOutput(self._logits[: len(logit_rows)], self._logits[:0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for rows in args.rows:
        for kind, fields in _KINDS.items():
            print(
                f"{rows:5} rows  {kind:<20} {measure_us(rows, fields, args.steps):9.1f} us a step"
            )


def measure_us(rows: int, fields: Mapping[str, Any], steps: int) -> float:
    info = dataclasses.replace(
        runner_info(num_blocks=32_768, max_model_len=4096), vocab_size=_VOCABULARY
    )
    runner = ModelRunner(_NoModel(), info, shaping=every_processor())  # type: ignore[arg-type]
    blocks = BlockManager.of(info, 8192)
    engine = Engine(runner, create_scheduler(SchedulerLimits(rows, 8192), blocks), blocks)
    others = {name: value for name, value in fields.items() if name != "sampling"}
    for number in range(rows):
        prompt = array("I", [(number * 31 + i) % _VOCABULARY for i in range(16)])
        request = EngineRequest(
            request_id=str(number),
            attempt=0,
            prompt=prompt.tobytes(),
            sampling=EngineSampling(**fields["sampling"]),
            max_tokens=steps + 20,
            **others,
        )
        engine.submit(request)
    seconds = []
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        started_s = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started_s)
    return 1e6 * statistics.median(seconds[steps // 4 :])


if __name__ == "__main__":
    main()
