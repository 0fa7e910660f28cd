"""Simultaneous streams: CPU time a token, times of tokens, and the possible number of streams.

Sub-commands `tokens`, `latency`, `streams` and `workers`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.router_bench import figures, loads
from benchmarks.router_bench.figures import Row, of_case
from benchmarks.router_bench.http_load import chat
from benchmarks.router_bench.scenario import (
    ENDLESS_TOKENS,
    LOAD_COLUMNS,
    Scenario,
    ratio,
    router_flags,
    shard_flags,
)
from benchmarks.router_bench.servers import Load, Meter, Servers, Usage, memory_bytes, serving
from benchmarks.router_bench.stamping_shard import Stamps
from penstock_cli.arguments import positive_int
from penstock_client import ShardClient

# From the begin of all streams to the begin of the window.
_SETTLE_S = 1.0
# For the end of streams that were cut off.
_REST_S = 0.5
_RESULT_TIMEOUT_S = 120.0
# If a smaller share of tokens comes in single events in time, figures would look too good.
_PROMPT_SHARE = 0.95

_STREAMED = chat(stream=True, max_tokens=ENDLESS_TOKENS)
_WHOLE = chat(stream=False, max_tokens=ENDLESS_TOKENS)


# ---- Windows -----------------------------------------------------------------------------------


def _streamed(servers: Servers, streams: int, seconds: float) -> Row:
    """Measure streams of the chat route through the router."""
    arguments = (servers.port, _STREAMED, streams, servers.stamps_files)
    with Load(loads.hold_streams, *arguments) as load:
        usage, row = _window(servers, load, seconds)
        load.stop(usage.from_s, usage.to_s)
        found = load.result(_RESULT_TIMEOUT_S)
    row.update(found)
    row["router_us"] = ratio(1e6 * usage.cpu_s["router"], found["tokens"])
    return _rested(row)


def _whole(servers: Servers, streams: int, seconds: float) -> Row:
    """Measure the same as whole answers; the shard counts the tokens."""
    with Load(loads.hold_answers, servers.port, _WHOLE, streams) as load:
        usage, row = _window(servers, load, seconds)
        load.stop()
        row.update(load.result(_RESULT_TIMEOUT_S))
    row["router_us"] = ratio(1e6 * usage.cpu_s["router"], row["tokens"])
    return _rested(row)


def _direct(servers: Servers, streams: int, seconds: float) -> Row:
    """Measure the same streams with only the client library."""
    arguments = (servers.addresses, streams, ENDLESS_TOKENS, servers.stamps_files)
    with Load(loads.fleet_streams, *arguments) as load:
        usage, row = _window(servers, load, seconds)
        load.stop(usage.from_s, usage.to_s)
        row.update(load.result(_RESULT_TIMEOUT_S))
    row["client_us"] = ratio(1e6 * usage.cpu_s["load"], row["tokens"])
    return _rested(row)


def _window(servers: Servers, load: Load, seconds: float) -> tuple[Usage, Row]:
    """Measure CPU time, tokens that the shard sent, and its step period."""
    load.wait_ready()
    time.sleep(_SETTLE_S)
    meter = Meter(servers, load=load.process)
    period_ms, preemptions = asyncio.run(_watch_steps(servers.addresses[0], seconds))
    usage = meter.read()
    tokens = Stamps(servers.stamps_files).num_tokens(usage.from_s, usage.to_s)
    row: Row = {
        "seconds": usage.wall_s,
        "tokens": tokens,
        "sent_tokens": tokens,
        "tokens_per_s": tokens / usage.wall_s,
        "period_ms": period_ms,
        "preemptions": preemptions,
        "router_mb": memory_bytes(servers.processes()["router"]) / 1e6,
        **usage.cores(),
    }
    return usage, row


def _rested(row: Row) -> Row:
    """Return the row after a pause in which cut-off streams are aborted."""
    time.sleep(_REST_S)
    return row


async def _watch_steps(address: str, seconds: float) -> tuple[float, int]:
    """Return the mean period of a shard's steps in a window, in ms, and its preemptions."""
    async with ShardClient(address) as shard:
        reports = shard.watch_load()
        first = last = await anext(reports)
        first_s = last_s = time.monotonic()
        while last_s < first_s + seconds:
            last, last_s = await anext(reports), time.monotonic()
        await reports.aclose()
    steps = last.steps_total - first.steps_total
    preemptions = last.preemptions_total - first.preemptions_total
    return ratio(1e3 * (last_s - first_s), steps), preemptions


# ---- tokens ------------------------------------------------------------------------------------


def _tokens_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=positive_int, nargs="+", default=[16, 64, 256],
                        metavar="N", help="at once (default: 16 64 256)")  # fmt: skip
    parser.add_argument("--shards", type=positive_int, default=4, metavar="N",
                        help="that share the streams; the tokens of one shard's step come all at "
                        "once (default: %(default)s)")  # fmt: skip


def _tokens(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    most = max(args.streams)
    flags = _shard(args, most), _router(args, most)
    with serving(folder, *flags, shards=args.shards, pin=args.pin) as servers:
        for number in range(args.rounds):
            for streams in args.streams:
                row = _streamed(servers, streams, args.seconds)
                yield {"case": f"streaming, {streams}", "round": number, **row}
            row = _whole(servers, most, args.seconds)
            yield {"case": f"in one piece, {most}", "round": number, **row}
            row = _direct(servers, most, args.seconds)
            yield {"case": f"gRPC client alone, {most}", "round": number, **row}


def _shard(args: argparse.Namespace, streams: int) -> list[str]:
    context = ("--max-model-len", 65_536, "--max-num-batched-tokens", 4096)
    return shard_flags(args, "--max-num-seqs", max(256, streams), *context)


def _router(args: argparse.Namespace, streams: int, *flags: object) -> list[str]:
    return router_flags(args, "--max-concurrent-requests", 2 * streams, *flags)


def _tokens_remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    lines = ["router and client us: CPU time for each token. prompt: tokens in an event of their "
             f"own within {1e3 * loads.PROMPT_EVENT_S:.0f} ms of the shard's send. The columns "
             "after that are cores."]  # fmt: skip
    for row in rows:
        share = row.get("prompt_share")
        if "router_us" in row and share is not None and share < _PROMPT_SHARE:
            lines.append(f"{row['case']}: does not count: {share:.2%} of tokens came so; "
                         f"{_PROMPT_SHARE:.0%} must")  # fmt: skip
    return lines + _troubles(rows)


def _troubles(rows: list[Row]) -> list[str]:
    """List events that make figures worthless."""
    return [
        f"{row['case']}: {key.replace('_', ' ')}: {row[key]:g}"
        for row in rows
        for key in ("lost", "unknown_tokens", "preemptions")
        if row.get(key)
    ]


def _tokens_draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    figures.bars(axes[0], rows, "router_us", "router CPU us a token")
    figures.bars(axes[1], rows, "client_us", "gRPC client CPU us a token")
    delays = {row["case"]: row["delays_ms"] for row in rows if "delays_ms" in row}
    figures.distributions(axes[2], delays, "from the shard's send to the client, ms")
    axes[2].set_xlim(0, 20)
    axes[2].axvline(1e3 * loads.PROMPT_EVENT_S, color="0.5", linestyle=":")


TOKENS = Scenario(
    help="the router's CPU time for each token",
    description="""\
CPU time of the router for each token of the chat route, streamed and in one piece, and of the gRPC
client alone on the same streams. The shard's tokens tell when they were sent, so that a router
that saves time by sending tokens late or together is found out.""",
    columns=(
        ("case", "case", ""),
        ("router_us", "router us", ".1f"),
        ("client_us", "client us", ".1f"),
        ("prompt_share", "prompt", ".1%"),
        ("delay_p50_ms", "delay p50 ms", ".2f"),
        ("delay_p99_ms", "p99", ".2f"),
        ("tokens_per_s", "tokens/s", ".0f"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_tokens_arguments,
    measure=_tokens,
    remarks=_tokens_remarks,
    draw=_tokens_draw,
    num_axes=3,
)


# ---- latency -----------------------------------------------------------------------------------


def _streams_argument(default: int) -> Any:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--streams", type=positive_int, default=default, metavar="N",
                            help="at once (default: %(default)s)")  # fmt: skip

    return add


def _latency(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    flags = _shard(args, args.streams), _router(args, args.streams)
    with serving(folder, *flags, pin=args.pin) as servers:
        for number in range(args.rounds):
            for case, measure in (("through the router", _streamed), ("gRPC client", _direct)):
                row = measure(servers, args.streams, args.seconds)
                yield {"case": case, "round": number, **row}


def _latency_remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    routed, direct = (of_case(rows, case) for case in ("through the router", "gRPC client"))
    return [
        f"inter-token p50 {routed['gap_p50_ms'] / args.step_ms:.3f} and p99 "
        f"{routed['gap_p99_ms'] / args.step_ms:.3f} of a step; the shard's period with the router "
        f"{routed['period_ms'] / direct['period_ms']:.4f} of that without",
        *_troubles(rows),
    ]


def _latency_draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    gaps = {f"round {row['round'] + 1}": row["gaps_ms"] for row in every if "router_us" in row}
    figures.distributions(axes[0], gaps, "between tokens, ms")
    longest = max((row["gap_p99_ms"] for row in every if "gap_p99_ms" in row), default=1.0)
    axes[0].set_xlim(0, 2 * longest)
    figures.bars(axes[1], rows, "period_ms", "the shard's step period, ms")


LATENCY = Scenario(
    help="time between tokens, and the shard's step period",
    description="""\
Time between a stream's tokens through the router, and the period of the shard's steps with the
router and with the gRPC client alone.""",
    columns=(
        ("case", "case", ""),
        ("gap_p50_ms", "gap p50 ms", ".2f"),
        ("gap_p99_ms", "p99", ".2f"),
        ("gap_max_ms", "max", ".1f"),
        ("period_ms", "period ms", ".3f"),
        ("tokens_per_s", "tokens/s", ".0f"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_streams_argument(256),
    measure=_latency,
    remarks=_latency_remarks,
    draw=_latency_draw,
    num_axes=2,
)


# ---- streams -----------------------------------------------------------------------------------


def _streams(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    flags = _shard(args, args.streams), _router(args, args.streams)
    with serving(folder, *flags, pin=args.pin) as servers:
        for number in range(args.rounds):
            idle_mb = memory_bytes(servers.processes()["router"]) / 1e6
            row = _streamed(servers, args.streams, args.seconds)
            each_kb = 1e3 * (row["router_mb"] - idle_mb) / args.streams
            more = {"idle_mb": idle_mb, "stream_kb": each_kb}
            yield {"case": f"round {number + 1}", "round": number, **row, **more}


def _streams_remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    lost, most_mb = sum(row["lost"] for row in rows), max(row["router_mb"] for row in rows)
    return [f"{lost} of {args.streams * len(rows)} streams lost; memory at most {most_mb:.0f} MB"]


def _streams_draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    gaps = {row["case"]: row["gaps_ms"] for row in every}
    figures.distributions(axes[0], gaps, "between tokens, ms")
    figures.bars(axes[1], rows, "router_mb", "router memory with all streams open, MB")


STREAMS = Scenario(
    help="thousands of streams at once on one worker",
    description="""\
Streams that are all open at once on one worker. One that ends, or says nothing within the window,
is lost. Steps are long (--step-ms), as for so many streams they would be.""",
    columns=(
        ("case", "case", ""),
        ("lost", "lost", "d"),
        ("idle_mb", "memory before MB", ".0f"),
        ("router_mb", "memory MB", ".0f"),
        ("stream_kb", "kB a stream", ".1f"),
        ("router_us", "router us", ".1f"),
        ("gap_p99_ms", "gap p99 ms", ".0f"),
        ("tokens_per_s", "tokens/s", ".0f"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_streams_argument(2000),
    measure=_streams,
    remarks=_streams_remarks,
    draw=_streams_draw,
    num_axes=2,
)


# ---- workers -----------------------------------------------------------------------------------


def _workers(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    for number in range(args.rounds):
        for workers in (1, 2):
            flags = _shard(args, args.streams), _router(args, args.streams, "--workers", workers)
            with serving(folder, *flags, pin=args.pin) as servers:
                row = _balanced(servers, args)
            yield {"case": f"{workers} worker{'s' * (workers > 1)}", "round": number, **row}


def _balanced(servers: Servers, args: argparse.Namespace) -> Row:
    arguments = (servers.port, _STREAMED, args.streams, servers.stamps_files)
    with Load(loads.hold_streams, *arguments) as load:
        usage, row = _window(servers, load, args.seconds)
        counts = [_connections(each, servers.port) for each in servers.processes()["router"]]
        load.stop(usage.from_s, usage.to_s)
        row.update(load.result(_RESULT_TIMEOUT_S))
    counts = [count for count in counts if count]
    row["router_us"] = ratio(1e6 * usage.cpu_s["router"], row["tokens"])
    row["streams_of_workers"] = counts
    row["busiest"] = ratio(max(counts, default=0) * len(counts), sum(counts))
    return row


def _connections(process: psutil.Process, port: int) -> int:
    """Count connections of clients to the port."""
    found = process.net_connections(kind="tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in found)


def _workers_remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    one, two = of_case(rows, "1 worker"), of_case(rows, "2 workers")
    return [
        f"CPU time a token with two workers: {two['router_us'] / one['router_us']:.3f} of that "
        f"with one; the busier has {two['busiest']:.3f} of the mean's streams "
        f"(first round: {two['streams_of_workers']})",
        *_troubles(rows),
    ]


def _workers_draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    figures.bars(axes[0], rows, "router_us", "router CPU us a token")
    figures.bars(axes[1], rows, "busiest", "streams of the busiest worker / mean")


WORKERS = Scenario(
    help="one worker against two",
    description="CPU time for each token and the balance of streams, with one worker and two.",
    columns=(
        ("case", "case", ""),
        ("router_us", "router us", ".1f"),
        ("busiest", "busiest / mean", ".3f"),
        ("gap_p99_ms", "gap p99 ms", ".2f"),
        ("prompt_share", "prompt", ".1%"),
        ("tokens_per_s", "tokens/s", ".0f"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_streams_argument(256),
    measure=_workers,
    remarks=_workers_remarks,
    draw=_workers_draw,
    num_axes=2,
)
