"""Measures scheduling of a real model: objectives under overload, and a long prompt.

    python benchmarks/scheduling.py slo
    python benchmarks/scheduling.py long-prompt --model DIR --prompt-tokens 100000

The engine runs in this process, as in a shard's engine process, and gets requests by the clock.

`slo` first measures the requests a second that the device can serve. Then it sends 1.3 times as
many; a fifth of them should have `slo` seconds between tokens. It does so with and without stating
this objective. It prints how many of that fifth met it (by the mean of gaps), output tokens a
second, and the longest wait for a token.

`long-prompt` adds a long prompt to 64 decoding streams, and prints the gaps between their tokens
before and during its computation.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import msgspec

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling, Objective
from penstock_shard.config import ShardConfig
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.worker.base import Runner


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("slo", "long-prompt"))
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random, 3 M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals (default: 60)")
    parser.add_argument("--slo", type=float, default=0.05, help="seconds between tokens")
    parser.add_argument("--prompt-tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.model or _make_model(Path(scratch) / "model", args)
        config = ShardConfig(
            device="cpu",
            threads=args.threads,
            max_num_seqs=max(args.max_num_seqs, 80),
            kv_memory_bytes=4 * 2**30,
        )
        from penstock_shard.model_loader.load_model_runner import load_model_runner

        runner = load_model_runner(config, directory, progress=lambda line: None)
        (objectives if args.what == "slo" else long_prompt)(runner, config, args)


def _make_model(directory: Path, args: argparse.Namespace) -> Path:
    from model_maker import make_model

    context = 2 * args.prompt_tokens if args.what == "long-prompt" else 2048
    make_model(directory, "llama-3m", max_position_embeddings=context)
    return directory


@dataclass
class Timeline:
    """The monotonic times at which a request and its tokens came."""

    request: EngineRequest
    arrived_s: float
    times_s: list[float] = field(default_factory=list)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]

    @property
    def longest_wait_s(self) -> float:
        return max([self.times_s[0] - self.arrived_s, *self.gaps_s])


# In tests of objectives, a sequence that waits longer goes first.
_AGING_S = 60.0


def serve(
    runner: Runner,
    limits: SchedulerLimits,
    arrivals: Sequence[tuple[float, EngineRequest]],
    max_queued: int = 10**9,
    aging_s: float = 600.0,
) -> list[Timeline]:
    """Run the engine until all requests have ended; refuse requests while the queue is full."""
    info = runner.info
    blocks = BlockManager.of(info, limits.max_num_batched_tokens)
    scheduler = create_scheduler(limits, blocks, aging_s=aging_s)
    engine = Engine(runner, scheduler, blocks)
    timelines: dict[str, Timeline] = {}
    ahead = sorted(arrivals, key=lambda arrival: arrival[0], reverse=True)
    start_s = time.monotonic()
    while ahead or engine.has_work:
        now_s = time.monotonic() - start_s
        while ahead and ahead[-1][0] <= now_s:
            at_s, request = ahead.pop()
            if scheduler.num_waiting < max_queued:
                timelines[request.request_id] = Timeline(request, start_s + at_s)
                engine.submit(request)
        if not engine.has_work:
            time.sleep(max(0.0, ahead[-1][0] - now_s))
            continue
        outputs = engine.step()
        now_s = time.monotonic()
        for output in outputs:
            timelines[output.request_id].times_s += [now_s] * len(output.token_ids)
    return list(timelines.values())


def _request(name: str, rng: random.Random, vocab: int, prompt: int, output: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        attempt=0,
        prompt=array("I", [rng.randrange(3, vocab) for _ in range(prompt)]).tobytes(),
        sampling=EngineSampling(temperature=0.0),
        max_tokens=output,
    )


def _with(objective: Objective, request: EngineRequest) -> EngineRequest:
    return msgspec.structs.replace(request, objective=objective)


def _limits(config: ShardConfig, args: argparse.Namespace) -> SchedulerLimits:
    tokens = config.batched_tokens("cpu")
    return SchedulerLimits(args.max_num_seqs, tokens, config.prefill_tokens("cpu"))


def _chat(name: str, rng: random.Random, vocab: int) -> EngineRequest:
    """Return a request with lengths as in chats: medians of 120 and 100 tokens."""
    prompt = min(1024, max(4, int(rng.lognormvariate(4.8, 0.8))))
    output = min(512, max(4, int(rng.lognormvariate(4.6, 0.7))))
    return _request(name, rng, vocab, prompt, output)


def objectives(runner: Runner, config: ShardConfig, args: argparse.Namespace) -> None:
    vocab = runner.info.vocab_size
    rng = random.Random(args.seed)
    limits = _limits(config, args)
    burst = [(0.0, _chat(str(i), rng, vocab)) for i in range(6 * args.max_num_seqs)]
    started_s = time.monotonic()
    serve(runner, limits, burst, aging_s=_AGING_S)
    capacity = len(burst) / (time.monotonic() - started_s)
    print(f"capacity {capacity:.2f} requests/s; offering 1.3 times as many")
    for with_slo in (True, False, True, False):
        rng = random.Random(args.seed + 1)
        arrivals: list[tuple[float, EngineRequest]] = []
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(1.3 * capacity)) < args.seconds:
            arrivals.append((at_s, _chat(str(len(arrivals)), rng, vocab)))
        chosen = {request.request_id for _, request in arrivals if rng.random() < 0.2}
        if with_slo:
            slo = Objective(seconds_between_tokens=args.slo)
            arrivals = [
                (at_s, _with(slo, request) if request.request_id in chosen else request)
                for at_s, request in arrivals
            ]
        started_s = time.monotonic()
        timelines = serve(
            runner, limits, arrivals, max_queued=2 * args.max_num_seqs, aging_s=_AGING_S
        )
        elapsed_s = time.monotonic() - started_s
        attained = [
            statistics.mean(timeline.gaps_s) <= args.slo
            for timeline in timelines
            if timeline.request.request_id in chosen
        ]
        rate = sum(len(timeline.times_s) for timeline in timelines) / elapsed_s
        print(
            f"slo {'said' if with_slo else 'kept secret':<12} "
            f"attained {statistics.mean(attained):6.1%}   {rate:7.1f} output tokens/s   "
            f"longest wait {max(t.longest_wait_s for t in timelines):.1f} s "
            f"(bound {_AGING_S:.0f})   {len(arrivals) - len(timelines)} turned away"
        )


def long_prompt(runner: Runner, config: ShardConfig, args: argparse.Namespace) -> None:
    vocab = runner.info.vocab_size
    rng = random.Random(args.seed)
    limits = _limits(config, args)
    streams = [(0.0, _request(str(i), rng, vocab, 64, args.prompt_tokens // 20)) for i in range(64)]
    long = _request("long", rng, vocab, args.prompt_tokens, 4)
    timelines = serve(runner, limits, [*streams, (args.seconds / 4, long)])
    joined = next(timeline for timeline in timelines if timeline.request is long)
    first_s, ended_s = joined.arrived_s, joined.times_s[0]
    before, during = [], []
    for timeline in timelines:
        for a, b in zip(timeline.times_s, timeline.times_s[1:], strict=False):
            if timeline.request is not long and b > timeline.times_s[0] + 2:
                if b < first_s:
                    before.append(b - a)
                elif a > first_s and b < ended_s:
                    during.append(b - a)
    print(f"{args.prompt_tokens} prompt tokens computed in {ended_s - first_s:.1f} s")
    for name, gaps in (("before", before), ("during", during)):
        gaps.sort()
        print(
            f"gaps {name}: {len(gaps)}, median {1000 * statistics.median(gaps):.1f} ms, p99 "
            f"{1000 * gaps[int(0.99 * len(gaps))]:.1f} ms, longest {1000 * gaps[-1]:.1f} ms"
        )


if __name__ == "__main__":
    main()
