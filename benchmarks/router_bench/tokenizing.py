"""Compares text work off and on the event loop, with requests of ordinary lengths."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.router_bench import figures
from benchmarks.router_bench.figures import Row, of_case
from benchmarks.router_bench.scenario import (
    LOAD_COLUMNS,
    Scenario,
    ratio,
    router_flags,
    shard_flags,
)
from benchmarks.router_bench.servers import Load, Meter, serving
from benchmarks.router_bench.stamping_shard import Stamps
from benchmarks.split_bench import load as sharegpt
from penstock_cli.arguments import positive_int

_ELSEWHERE, _INLINE = "as it is", "all on the loop"
_MODULES = {_ELSEWHERE: "penstock_router", _INLINE: "benchmarks.router_bench.inline_router"}
_WARMUP_S = 3.0
_RESULT_TIMEOUT_S = 60.0


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=positive_int, default=64, metavar="N",
                        help="at once (default: %(default)s)")  # fmt: skip


def _measure(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    for number in range(args.rounds):
        # In turns: the first in one round is the last in the next.
        for case in list(_MODULES)[:: 1 if number % 2 else -1]:
            flags = shard_flags(args, "--max-num-seqs", args.streams), router_flags(args)
            with serving(folder, *flags, pin=args.pin, router=_MODULES[case]) as servers:
                traffic = sharegpt.Traffic(args.streams, 0.0, _WARMUP_S, seed=number)
                with Load(sharegpt.send, servers.port, traffic) as load:
                    load.wait_ready()
                    meter = Meter(servers, load=load.process)
                    time.sleep(args.seconds)
                    usage = meter.read()
                    load.stop(usage.from_s, usage.to_s)
                    row = load.result(_RESULT_TIMEOUT_S)
                tokens = Stamps(servers.stamps_files).num_tokens(usage.from_s, usage.to_s)
            rates = {"tokens_per_s": tokens / usage.wall_s, **usage.cores()}
            row["router_us"] = ratio(1e6 * usage.cpu_s["router"], tokens)
            yield {"case": case, "round": number, **row, **rates}


def _remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    ours, inline = of_case(rows, _ELSEWHERE), of_case(rows, _INLINE)
    compared = (("tokens/s", "tokens_per_s"), ("TTFT p50", "ttft_p50_ms"),
                ("TTFT p99", "ttft_p99_ms"))  # fmt: skip
    ratios = [f"{name} {ratio(ours[key], inline[key]):.3f}" for name, key in compared]
    return [f"off the loop, of what it is on it: {', '.join(ratios)}"]


def _draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    figures.bars(axes[0], rows, "tokens_per_s", "tokens a second")
    figures.distributions(axes[1], {row["case"]: row["ttfts_ms"] for row in rows}, "TTFT, ms")


TOKENIZING = Scenario(
    help="text work off the event loop against text work on it",
    description="""\
Completions of ShareGPT-like lengths, so many at once, with the router as it is and with one that
tokenizes everything on its event loop.""",
    columns=(
        ("case", "case", ""),
        ("requests", "requests", ".0f"),
        ("failed", "failed", ".0f"),
        ("tokens_per_s", "tokens/s", ".0f"),
        ("ttft_p50_ms", "TTFT p50 ms", ".1f"),
        ("ttft_p99_ms", "p99", ".1f"),
        ("gap_p99_ms", "gap p99 ms", ".1f"),
        ("router_us", "router us", ".1f"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_arguments,
    measure=_measure,
    remarks=_remarks,
    draw=_draw,
    num_axes=2,
)
