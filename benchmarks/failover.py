"""Measures what clients notice when shards die, hang, drain and restart: gaps and errors.

    python benchmarks/failover.py crash
    python benchmarks/failover.py hang
    python benchmarks/failover.py rolling --seconds 120
    python benchmarks/failover.py aborts --seconds 30
    python benchmarks/failover.py crash --model DIR

Starts shards on this machine, with the fake runner unless --model names a model, and sends them
requests through `penstock_client.Fleet`, as a router does. Every output is compared with that of an
unbroken run; a difference ends the script with status 1.

`crash` kills an engine in each round. It prints the gaps of its streams, the largest gap of a calm
run and the time to prefill. `hang` stops an engine instead. `rolling` restarts four shards one
after another under steady requests. `aborts` aborts requests at a steady rate. It prints how long
an abort takes to reach the engine, and the tokens that come after it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.processes import Shard, running

from penstock_client import Fleet, GenerationRequest, PenstockError, SamplingParams, ShardClient


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("crash", "hang", "rolling", "aborts"))
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the fake runner")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the fake runner")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second (rolling)")
    parser.add_argument("--abort-rate", type=float, default=1000.0, help="aborts a second")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument(
        "--stall-timeout-s", type=float, default=1.0, help="of the shards, in seconds"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    scenario = {"crash": strike, "hang": strike, "rolling": rolling, "aborts": aborts}[args.what]
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(scenario(args, Path(folder)))


# ---- requests, and when their tokens came ------------------------------------------------------


@dataclass
class Reading:
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.times_s)]

    def gap_over(self, at_s: float) -> float | None:
        """Return the gap around this moment; None before the first and after the last token."""
        for earlier, later in itertools.pairwise(self.times_s):
            if earlier <= at_s < later:
                return later - earlier
        return None


async def read(client: Fleet | ShardClient, request: GenerationRequest) -> Reading:
    reading = Reading(times_s=[time.monotonic()])
    try:
        async with client.submit(request) as stream:
            async for output in stream:
                reading.token_ids += output.token_ids
                reading.times_s.append(time.monotonic())
    except PenstockError as error:
        reading.error = str(error)
    return reading


def make_requests(
    args: argparse.Namespace, rng: random.Random, count: int
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            [rng.randrange(3, 1000) for _ in range(args.prompt_tokens)],
            SamplingParams(temperature=1.0, seed=rng.getrandbits(64)),
            max_tokens=args.output_tokens,
            ignore_eos=True,
        )
        for _ in range(count)
    ]


def start_shards(args: argparse.Namespace, folder: Path, count: int, *more: str) -> list[Shard]:
    return [start_shard(args, folder, index, None, *more) for index in range(count)]


def start_shard(
    args: argparse.Namespace, folder: Path, index: int, port: int | None, *more: str
) -> Shard:
    flags = ["--stall-timeout-s", str(args.stall_timeout_s), *more]
    if args.model is not None:
        flags += ["--model", str(args.model), "--threads", "1"]
    else:
        flags += ["--step-ms", str(args.step_ms)]
    return Shard(folder / f"shard{index}.log", *flags, port=port)


async def all_ready(fleet: Fleet) -> None:
    while not all(shard.ready for shard in fleet.shards):
        await asyncio.sleep(0.02)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def row(name: str, values_s: Sequence[float]) -> None:
    if values_s:
        shown = (statistics.median(values_s), percentile(values_s, 0.99), max(values_s))
        print(
            f"{name:<46}"
            + "".join(f"{1000 * value:>9.1f}" for value in shown)
            + f"{len(values_s):>8}"
        )


def heading() -> None:
    print(f"{'ms':<46}{'p50':>9}{'p99':>9}{'max':>9}{'count':>8}")


# ---- scenarios ---------------------------------------------------------------------------------


async def strike(args: argparse.Namespace, folder: Path) -> int:
    """Kill or stop an engine in each round."""
    rng = random.Random(args.seed)
    shards = start_shards(args, folder, 2)
    calm_gaps, first_tokens, gaps, wrong = [], [], [], 0
    with running(*shards):
        async with Fleet(
            [s.address for s in shards], stall_timeout_s=args.stall_timeout_s
        ) as fleet:
            for number in range(args.rounds):
                await all_ready(fleet)
                requests = make_requests(args, rng, args.streams)
                calm = await asyncio.gather(*(read(fleet, request) for request in requests))
                calm_gaps += [max(reading.gaps_s[1:]) for reading in calm]
                first_tokens += [reading.gaps_s[0] for reading in calm]
                length_s = max(reading.times_s[-1] - reading.times_s[0] for reading in calm)
                tasks = [asyncio.create_task(read(fleet, request)) for request in requests]
                await asyncio.sleep(rng.uniform(0.2, 0.7) * length_s)
                victim = shards[number % 2]
                if args.what == "crash":
                    victim.engine.kill()
                else:
                    victim.engine.send_signal(signal.SIGSTOP)
                struck_s = time.monotonic()
                broken = await asyncio.gather(*tasks)
                wrong += sum(a.token_ids != b.token_ids for a, b in zip(calm, broken, strict=True))
                usual_s = percentile(calm_gaps, 0.99)
                seen = [reading.gap_over(struck_s) for reading in broken]
                # Streams of the other shard saw no gap, or only had to make room.
                gaps += [gap for gap in seen if gap is not None and gap > 2 * usual_s]
                print(f"round {number + 1} of {args.rounds}", end="\r", file=sys.stderr)
    heading()
    row("calm: largest gap of a stream", calm_gaps)
    row("calm: time to first token", first_tokens)
    row(f"{args.what}: gap of the streams that it hit", gaps)
    print(f"outputs that differ from the calm run's: {wrong} of {args.rounds * args.streams}")
    return 1 if wrong else 0


async def rolling(args: argparse.Namespace, folder: Path) -> int:
    """Restart four shards one after another, repeatedly, while requests arrive."""
    rng = random.Random(args.seed)
    shards = start_shards(args, folder, 4)
    kinds = make_requests(args, rng, 32)
    tasks: list[asyncio.Task[Reading]] = []
    restarts = 0
    with running(*shards):
        try:
            async with Fleet([shard.address for shard in shards]) as fleet:
                await all_ready(fleet)
                calm = await asyncio.gather(*(read(fleet, request) for request in kinds))
                usual = [gap for reading in calm for gap in reading.gaps_s[1:]]
                ends_s = time.monotonic() + args.seconds

                async def restart() -> None:
                    nonlocal restarts
                    for index in itertools.cycle(range(len(shards))):
                        if time.monotonic() > ends_s:
                            return
                        port = int(shards[index].address.rpartition(":")[2])
                        await asyncio.to_thread(shards[index].terminate, 40)
                        shards[index] = start_shard(args, folder, index, port)
                        await asyncio.sleep(1.0)
                        await all_ready(fleet)
                        restarts += 1

                restarting = asyncio.create_task(restart())
                while time.monotonic() < ends_s:
                    request = kinds[len(tasks) % len(kinds)]
                    tasks.append(asyncio.create_task(read(fleet, request)))
                    await asyncio.sleep(rng.expovariate(args.rate))
                    print(f"{len(tasks)} requests, {restarts} restarts", end="\r", file=sys.stderr)
                await restarting
                readings = await asyncio.gather(*tasks)
        finally:
            for shard in shards:
                shard.close()
    errors = [reading.error for reading in readings if reading.error]
    expected = itertools.cycle(calm)
    wrong = sum(a.token_ids != b.token_ids for a, b in zip(readings, expected, strict=False))
    heading()
    row("calm: gaps", usual)
    row("rolling restart: gaps", [gap for reading in readings for gap in reading.gaps_s[1:]])
    row(
        "rolling restart: largest gap of each request",
        [max(r.gaps_s[1:], default=0.0) for r in readings],
    )
    row("rolling restart: time to first token", [r.gaps_s[0] for r in readings if r.gaps_s])
    print(f"{len(readings)} requests, {restarts} restarts: {len(errors)} errors, {wrong} differ")
    for error in sorted(set(errors))[:5]:
        print(f"  {error}")
    return 1 if errors or wrong else 0


async def aborts(args: argparse.Namespace, folder: Path) -> int:
    """Submit and abort at a steady rate. Ten times a second, read an aborted stream on, to see when
    the engine ended it and which tokens came after the abort.
    """
    rng = random.Random(args.seed)
    flags = ("--max-num-seqs", "512", "--max-queued-requests", "4096")
    (shard,) = start_shards(args, folder, 1, *flags)
    latencies: list[float] = []
    wasted: list[int] = []
    with running(shard):
        async with ShardClient(shard.address) as client:

            async def leave(request: GenerationRequest) -> None:
                async with client.submit(request) as stream:
                    await anext(stream)

            async def probe(request: GenerationRequest) -> None:
                stream = client.submit(request)
                await anext(stream)
                asked_s = time.monotonic()
                aborting = asyncio.create_task(client.abort([stream.request_id]))
                wasted.append(sum([len(output.token_ids) async for output in stream]))
                latencies.append(time.monotonic() - asked_s)
                await aborting

            requests = make_requests(args, rng, 1000)
            tasks: set[asyncio.Task[None]] = set()
            started_s = time.monotonic()
            sent = 0
            while (elapsed_s := time.monotonic() - started_s) < args.seconds:
                while sent < elapsed_s * args.abort_rate:
                    how = leave if sent % int(args.abort_rate / 10) else probe
                    task = asyncio.create_task(how(requests[sent % len(requests)]))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    sent += 1
                await asyncio.sleep(0.002)
                print(f"{sent} sent, {len(tasks)} unread", end="\r", file=sys.stderr)
            await asyncio.gather(*tasks)
            in_use = await blocks_in_use_at_rest(client)
    heading()
    row("abort to the end of its stream", latencies)
    print(f"tokens after an abort: mean {statistics.mean(wasted):.2f}, most {max(wasted)}")
    print(f"{sent / args.seconds:.0f} aborts a second; blocks in use at the end: {in_use}")
    return 1 if in_use else 0


async def blocks_in_use_at_rest(client: ShardClient) -> int:
    """Count blocks in use once nothing runs, or after ten seconds."""
    reports = client.watch_load()
    until_s = time.monotonic() + 10
    load = await anext(reports)
    while load.referenced_blocks and time.monotonic() < until_s:
        load = await anext(reports)
    await reports.aclose()
    return load.referenced_blocks


if __name__ == "__main__":
    sys.exit(main())
