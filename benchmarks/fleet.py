"""Measures how policies share requests among shards, on simulated devices and a simulated clock.

    python benchmarks/fleet.py chat
    python benchmarks/fleet.py mixed --rate 2 --policies round-robin least-load
    python benchmarks/fleet.py chat --shards 200 --seconds 30 --plot fleet.png --json fleet.json

Every shard is a shard's own engine, scheduler and KV block manager over a simulated device. A step
takes 10 ms, 0.1 ms for each prompt token and each decode, and a little for each key; 160,000 tokens
fit into the cache. Load reports reach the fleet at most ten times a second, and the client
package's policies choose shards.

`chat`: conversations of 2 to 12 turns that share four system prompts, with pauses of 8 s between
turns. `mixed`: single requests that share nothing; one in ten has a prompt of 4,000 to 16,000
tokens; for 2 s of every 20, the rate is three times as high. The same seed gives the same traffic
and figures on any machine.

Columns: output tokens a second while requests came; milliseconds to the first token, and between
tokens; the share of prompt tokens that was found cached; and the requests of the busiest shard
divided by the mean, sampled once a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from simulation.fleet_traces import chat, mixed
from simulation.policies import SimulatedFleet, Summary

from penstock_client.load_balancing.policies import POLICIES, make_policy
from penstock_common.version import how_to_install

_TRACES = {"chat": (chat, 0.6), "mixed": (mixed, 1.5)}
_HEADINGS = (
    f"{'policy':<16}{'requests':>9}{'tokens/s':>10}{'first p50':>11}{'first p99':>11}"
    f"{'gap p99':>9}{'cached':>8}{'imbalance':>11}{'wall s':>8}"
)


def main() -> None:
    args = parse_args()
    rate = args.rate or _TRACES[args.trace][1]
    print(f"{args.trace}: {args.shards} shards, {args.seconds:g} s of arrivals, {rate:g} a second "
          f"and shard, seed {args.seed}")  # fmt: skip
    print(_HEADINGS)
    runs: dict[str, SimulatedFleet] = {}
    for name in args.policies:
        started_s = time.monotonic()
        runs[name] = run(args.trace, name, args.shards, args.seconds, rate, args.seed)
        summary = runs[name].summary(args.seconds)
        print(row(name, summary) + f"{time.monotonic() - started_s:>8.1f}", flush=True)
    setting = {"trace": args.trace, "shards": args.shards, "seconds": args.seconds, "rate": rate,
               "seed": args.seed}  # fmt: skip
    if args.json:
        summaries = {n: dataclasses.asdict(f.summary(args.seconds)) for n, f in runs.items()}
        args.json.write_text(json.dumps({**setting, "policies": summaries}, indent=2) + "\n")
    if args.plot:
        title = f"{args.trace}, {args.shards} shards, {rate:g} arrivals a second and shard"
        plot(runs, args.seconds, title, args.plot)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", choices=_TRACES, help="what users do")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES),
                        metavar="NAME", help=f"default: {' '.join(POLICIES)}")  # fmt: skip
    parser.add_argument("--shards", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S",
                        help="of arrivals (default: 120)")  # fmt: skip
    parser.add_argument("--rate", type=float, metavar="R",
                        help="conversations (chat) or requests (mixed) that begin each second, for "
                        "each shard (default: 0.6 and 1.5)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG there")
    args = parser.parse_args(argv)
    if args.shards < 1:
        parser.error(f"--shards {args.shards}: must be at least 1")
    if args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g}: must be more than 0")
    if args.rate is not None and args.rate <= 0:
        parser.error(f"--rate {args.rate:g}: must be more than 0")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error(f"--plot: needs matplotlib; {how_to_install('bench')}")
    return args


def run(
    trace: str, policy: str, shards: int, seconds: float, rate: float, seed: int
) -> SimulatedFleet:
    """Run all requests of the trace through a policy; report progress on stderr."""
    make_trace, _ = _TRACES[trace]
    conversations = make_trace(
        random.Random(seed), shards=shards, seconds=seconds, starts_per_s=rate
    )
    fleet = SimulatedFleet(shards, partial(make_policy, policy))

    def progress(now_s: float) -> None:
        doing = "" if now_s < seconds else ", no more arrivals"
        line = f"{policy}: {now_s:.0f} s simulated{doing}, {len(fleet.answers)} requests"
        if sys.stderr.isatty():
            print(f"\r{line:<70}", end="", file=sys.stderr, flush=True)
        elif round(now_s) % 30 == 0:
            print(line, file=sys.stderr, flush=True)

    fleet.run(conversations, progress)
    if sys.stderr.isatty():
        print(f"\r{'':<70}\r", end="", file=sys.stderr, flush=True)
    return fleet


def row(name: str, summary: Summary) -> str:
    return (
        f"{name:<16}{summary.requests:>9}{summary.output_tokens_per_s:>10.0f}"
        f"{1e3 * summary.first_token_p50_s:>11.0f}{1e3 * summary.first_token_p99_s:>11.0f}"
        f"{1e3 * summary.inter_token_p99_s:>9.0f}{summary.cached_share:>8.1%}"
        f"{summary.imbalance:>11.2f}"
    )


def plot(runs: dict[str, SimulatedFleet], seconds: float, title: str, path: Path) -> None:
    """Draw the distribution of times to first tokens, the cached share and the imbalance."""
    figure: Any = importlib.import_module("matplotlib.figure").Figure(
        figsize=(12, 3.6), layout="constrained"
    )
    figure.suptitle(title)
    first, cached, imbalance = figure.subplots(1, 3)
    for number, (name, fleet) in enumerate(runs.items()):
        waits_ms = sorted(1e3 * answer.first_token_s for answer in fleet.answers)
        shares = [100 * (index + 1) / len(waits_ms) for index in range(len(waits_ms))]
        first.plot(waits_ms, shares, label=name, color=f"C{number}")
        summary = fleet.summary(seconds)
        cached.bar(name, 100 * summary.cached_share, color=f"C{number}")
        imbalance.bar(name, summary.imbalance, color=f"C{number}")
    first.set_xscale("log")
    first.set_xlabel("time to first token, ms")
    first.set_ylabel("% of requests")
    first.legend()
    cached.set_title("prompt tokens found cached, %")
    imbalance.set_title("requests on the busiest shard / mean")
    for axes in (cached, imbalance):
        axes.tick_params("x", labelrotation=15)
    for axes in (first, cached, imbalance):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=80)


if __name__ == "__main__":
    main()
