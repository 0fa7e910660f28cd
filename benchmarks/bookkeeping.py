"""Measures the engine's own Python beside the runner: scheduling, results, encoding.

    python benchmarks/bookkeeping.py                     (fake runner, 1,024 sequences)
    python benchmarks/bookkeeping.py --runner model --sequences 64

Prints medians over steady decode steps, per step and per token; and output processing's share of a
step: handling sampled tokens and encoding them for the server process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from penstock_common.child_process.framing import encode_frame
from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.config import ShardConfig
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.ipc.messages import StepOutputs
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.worker.base import Runner


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runner", choices=("fake", "model"), default="fake")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random, 3 M")
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        make = _fake_runner if args.runner == "fake" else _model_runner
        measure(make(args, Path(scratch)), args)


def _fake_runner(args: argparse.Namespace, scratch: Path) -> Runner:
    from support.engines import EOS_ID, runner_info

    from penstock_shard.worker.fake_kv import FakeKv
    from penstock_shard.worker.fake_runner import FakeRunner

    info = runner_info(num_blocks=65_536, max_model_len=4096, max_steps_ahead=0)
    return FakeRunner(info, range(EOS_ID), step_s=0.0, kv=FakeKv(info))


def _model_runner(args: argparse.Namespace, scratch: Path) -> Runner:
    from model_maker import make_model

    from penstock_shard.model_loader.load_model_runner import load_model_runner

    directory = args.model or make_model(scratch / "model", "llama-3m")
    config = ShardConfig(device="cpu", threads=1, max_num_seqs=args.sequences)
    return load_model_runner(config, directory, progress=lambda line: None)


class _Timed:
    """Times the calls of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        started_s = time.perf_counter()
        result = self._function(*arguments)
        self.seconds.append(time.perf_counter() - started_s)
        return result


def measure(runner: Runner, args: argparse.Namespace) -> None:
    info = runner.info
    blocks = BlockManager.of(info, 4096)
    scheduler: Any = create_scheduler(SchedulerLimits(args.sequences, 4096), blocks)
    timed: Any = runner
    engine: Any = Engine(runner, scheduler, blocks)
    schedule = scheduler.schedule = _Timed(scheduler.schedule)
    launch = timed.launch = _Timed(timed.launch)
    collect = timed.collect = _Timed(timed.collect)
    step, encode = _Timed(engine.step), _Timed(encode_frame)
    take_pieces = _Timed(engine.take_changed_pieces)
    for number in range(args.sequences):
        engine.submit(_request(number, info.vocab_size, args.steps + 40))
    while len(step.seconds) < args.steps:
        outputs = step()
        encode(StepOutputs(outputs, engine.load(), take_pieces()))
    report(args, step, schedule, launch, collect, encode, take_pieces)


def _request(number: int, vocab_size: int, max_tokens: int) -> EngineRequest:
    prompt = [(number * 31 + i) % vocab_size for i in range(32)]
    return EngineRequest(
        request_id=str(number),
        attempt=0,
        prompt=array("I", prompt).tobytes(),
        sampling=EngineSampling(temperature=0.0),
        max_tokens=max_tokens,
    )


def report(
    args: argparse.Namespace,
    step: _Timed,
    schedule: _Timed,
    launch: _Timed,
    collect: _Timed,
    encode: _Timed,
    take_pieces: _Timed,
) -> None:
    def median_ms(values: Sequence[float]) -> float:
        return 1000 * statistics.median(values[len(values) // 2 :])

    runner_ms = median_ms(launch.seconds) + median_ms(collect.seconds)
    take_ms = median_ms(step.seconds) - runner_ms - median_ms(schedule.seconds)
    encode_ms = median_ms(encode.seconds) + median_ms(take_pieces.seconds)
    whole_ms = median_ms(step.seconds) + encode_ms
    rows = {
        "runner": runner_ms,
        "schedule": median_ms(schedule.seconds),
        "take in": take_ms,
        "encode": encode_ms,
        "engine without runner": whole_ms - runner_ms,
    }
    for name, value_ms in rows.items():
        print(
            f"{name:<24}{value_ms:8.3f} ms a step {1000 * value_ms / args.sequences:8.2f} us/token"
        )
    print(f"output processing       {(take_ms + encode_ms) / whole_ms:8.1%} of the step")


if __name__ == "__main__":
    main()
