"""Requests that come and go: many in a row, very long ones, first tokens, overload.

Sub-commands `requests`, `long`, `ttft` and `overload`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.router_bench import figures, loads
from benchmarks.router_bench.figures import Row, of_case, percentile
from benchmarks.router_bench.http_load import MODEL, chat, get, post, write_keys
from benchmarks.router_bench.loads import Arrivals
from benchmarks.router_bench.scenario import (
    LOAD_COLUMNS,
    Scenario,
    positive,
    ratio,
    router_flags,
    shard_flags,
)
from benchmarks.router_bench.servers import Load, Meter, Servers, memory_bytes, serving
from penstock_cli.arguments import positive_int

_RESULT_TIMEOUT_S = 600.0
# Time beyond an answer's length after which a request counts as hung.
_PATIENCE_S = 30.0
# About one token each in the builtin tokenizer.
_WORDS = ("the", "and", "you", "for", "that", "with", "know", "only", "can", "one", "more", "this")


def _words(count: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


def _measured(servers: Servers, load: Load, args: argparse.Namespace) -> Row:
    """Return the results and costs of a load that ends by itself."""
    with load:
        load.wait_ready()
        meter = Meter(servers, load=load.process)
        found: Row = load.result(2 * args.seconds + 2 * _PATIENCE_S)
        return {**found, **meter.read().cores()}


# ---- requests ----------------------------------------------------------------------------------


def _requests_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--requests",
        type=positive_int,
        default=5000,
        metavar="N",
        help="in a row (default: %(default)s)",
    )
    add("--connections", type=positive_int, default=16, metavar="N", help="(default: %(default)s)")
    add("--output-tokens", type=positive_int, default=4, metavar="N", help="(default: %(default)s)")


def _requests(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    kinds = [chat(stream=stream, max_tokens=args.output_tokens) for stream in (True, False)]
    with serving(folder, shard_flags(args), router_flags(args), pin=args.pin) as servers:
        for number in range(args.rounds):
            arguments = (servers.port, kinds, args.connections, args.requests)
            with Load(loads.closed_loop, *arguments) as load:
                load.wait_ready()
                meter = Meter(servers, load=load.process)
                counts, sizes_mb, found = _watch_memory(servers, load)
                usage = meter.read()
            yield {
                "case": f"round {number + 1}",
                "round": number,
                **usage.cores(),
                **found,
                **_flatness(counts, sizes_mb, args.requests),
                "requests_per_s": args.requests / found["wall_s"],
                "router_request_us": 1e6 * usage.cpu_s["router"] / args.requests,
            }


def _watch_memory(servers: Servers, load: Load) -> tuple[list[int], list[float], Row]:
    """Return numbers of answers, the router's memory at those times, in MB, and the result."""
    processes = servers.processes()["router"]
    counts, sizes_mb = [0], [memory_bytes(processes) / 1e6]
    while isinstance(said := load.result(_RESULT_TIMEOUT_S), int):
        counts.append(said)
        sizes_mb.append(memory_bytes(processes) / 1e6)
    return counts, sizes_mb, said


def _flatness(counts: list[int], sizes_mb: list[float], total: int) -> Row:
    """Compute how far memory differs later from that after the first tenth."""
    settled = [size for count, size in zip(counts, sizes_mb, strict=True) if count >= total / 10]
    return {
        "counts": counts,
        "sizes_mb": sizes_mb,
        "first_mb": sizes_mb[0],
        "tenth_mb": settled[0],
        "last_mb": settled[-1],
        "strays": max(abs(size / settled[0] - 1) for size in settled),
    }


def _requests_remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    strays = max(row["strays"] for row in rows)
    lines = [f"after the first tenth memory strays by {strays:.1%} at most"]
    return lines + [f"first failure: {row['first_failure'][0]}" for row in rows if row["failed"]]


def _requests_draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    for row in every:
        axes[0].plot(row["counts"], row["sizes_mb"], label=row["case"])
    axes[0].set_ylim(0, 1.2 * max(max(row["sizes_mb"]) for row in every))
    axes[0].set_xlabel("requests answered")
    axes[0].set_ylabel("router memory, MB")
    figures.bars(axes[1], rows, "router_request_us", "router CPU us a request")


REQUESTS = Scenario(
    help="many requests in a row, and the router's memory",
    description="""\
Requests of a few tokens in a row, every second one streamed, and the router's resident memory over
them. Memory is steady from 10,000 requests on or so: use --requests 100000 to judge it.""",
    columns=(
        ("case", "case", ""),
        ("failed", "failed", "d"),
        ("requests_per_s", "requests/s", ".0f"),
        ("router_request_us", "router us", ".0f"),
        ("first_mb", "memory MB: first", ".1f"),
        ("tenth_mb", "at a tenth", ".1f"),
        ("last_mb", "last", ".1f"),
        ("strays", "strays", ".1%"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_requests_arguments,
    measure=_requests,
    remarks=_requests_remarks,
    draw=_requests_draw,
    num_axes=2,
)


# ---- long --------------------------------------------------------------------------------------

_Body = Callable[[str], dict[str, Any]]


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# Name -> path, and body around a text.
_LONG_KINDS: dict[str, tuple[str, _Body]] = {
    "completions": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 1}),
    "two prompts": ("/v1/completions", lambda text: {"prompt": [text, text], "max_tokens": 1}),
    "chat": ("/v1/chat/completions", lambda text: {"messages": _user(text), "max_tokens": 1}),
    "embeddings": ("/v1/embeddings", lambda text: {"input": text}),
    "tokenize": ("/tokenize", lambda text: {"prompt": text}),
    "generate": ("/generate", lambda text: {"inputs": text, "parameters": {"max_new_tokens": 1}}),
    "responses": ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 1}),
    "messages": ("/v1/messages", lambda text: {"messages": _user(text), "max_tokens": 1}),
}
_SHORT_CONTEXT = 2048
_PROBE_PERIOD_S = 0.01
# Repeat bursts at least this long, because refusals are fast.
_LEAST_S = 3.0


def _long_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--requests",
        type=positive_int,
        default=60,
        metavar="N",
        help="at once (default: %(default)s)",
    )
    add(
        "--words",
        type=positive_int,
        default=300_000,
        metavar="N",
        help="in each (default: %(default)s)",
    )
    add("--kinds", nargs="+", choices=_LONG_KINDS, default=list(_LONG_KINDS), metavar="KIND",
        help=f"default: {', '.join(_LONG_KINDS)}")  # fmt: skip
    add("--contexts", type=positive_int, nargs="+", default=[_SHORT_CONTEXT, 1_000_000],
        metavar="TOKENS",
        help="of the shard: one that refuses such a prompt, and one that takes it (default: "
        f"{_SHORT_CONTEXT} 1000000)")  # fmt: skip


def _long(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    for context in args.contexts:
        queue = ("--max-queued-tokens", 2 * args.requests * context)
        blocks = ("--kv-blocks", max(100_000, 2 * context // 16))
        flags = shard_flags(args, "--max-model-len", context, *queue, *blocks)
        with serving(folder, flags, router_flags(args), pin=args.pin) as servers:
            # The device is not measured, but its CPU time would disturb.
            for process in (*servers.processes()["shard"], *servers.processes()["engine"]):
                process.nice(10)
            for number in range(args.rounds):
                row = _probed(servers, None, args)
                yield {"case": f"context {context}: nothing", "round": number, **row}
                for kind in args.kinds:
                    row = _probed(servers, kind, args)
                    yield {"case": f"context {context}: {kind}", "round": number, **row}


def _probed(servers: Servers, kind: str | None, args: argparse.Namespace) -> Row:
    """Send GET /health repeatedly, during such requests or some idle seconds."""
    with Load(loads.probe, servers.port, get("/health"), _PROBE_PERIOD_S) as probe:
        probe.wait_ready()
        found = _idle(servers) if kind is None else _burst(servers, kind, args)
        probe.stop()
        probes: list[tuple[float, float]] = probe.result(_PATIENCE_S)
    windows: list[tuple[float, float]] = found["windows"]
    took_s = [seconds for sent_s, seconds in probes if _overlaps(windows, sent_s, seconds)]
    statuses: dict[str, int] = found.get("statuses", {})
    return {
        **found,
        "wall_s": statistics.fmean(to_s - from_s for from_s, to_s in windows),
        "bursts": len(windows),
        "answers": ", ".join(f"{count} x {status}" for status, count in statuses.items()) or "-",
        "probes": len(took_s),
        "health_p50_ms": 1e3 * statistics.median(took_s),
        "health_p99_ms": 1e3 * percentile(took_s, 0.99),
        "health_max_ms": 1e3 * max(took_s),
    }


def _overlaps(windows: list[tuple[float, float]], sent_s: float, seconds: float) -> bool:
    """Tell whether a probe overlaps a burst, even if it was sent before and had to wait."""
    return any(sent_s + seconds > from_s and sent_s < to_s for from_s, to_s in windows)


def _idle(servers: Servers) -> Row:
    meter = Meter(servers)
    time.sleep(_LEAST_S)
    usage = meter.read()
    return {"windows": [(usage.from_s, usage.to_s)], **usage.cores()}


def _burst(servers: Servers, kind: str, args: argparse.Namespace) -> Row:
    path, body = _LONG_KINDS[kind]
    request = post(path, {"model": MODEL, **body(_words(args.words))})
    arguments = (servers.port, request, args.requests, _LEAST_S, args.seconds)
    with Load(loads.bursts, *arguments) as load:
        load.wait_ready()
        meter = Meter(servers, load=load.process)
        found: Row = load.result(args.seconds + _PATIENCE_S)
        return {**found, **meter.read().cores()}


def _long_remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    worst = max(rows, key=lambda row: float(row["health_max_ms"]))
    return [
        f"worst: {worst['health_max_ms']:.1f} ms, {worst['case']}. Requests that are not answered "
        f"after {args.seconds:g} s are given up."
    ]


def _long_draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    figures.bars(axes[0], rows, "health_p50_ms", "GET /health median, ms")
    figures.bars(axes[1], rows, "health_max_ms", "GET /health worst, ms")
    axes[1].set_yticklabels([])


LONG = Scenario(
    help="GET /health while many far too long texts come at once",
    description="""\
How long GET /health takes while long texts come on each route: refused by a short context, and
admitted by a long one. Short bursts come several times, and only what is asked meanwhile counts.
'nothing' is the same without such requests.""",
    columns=(
        ("case", "case", ""),
        ("health_p50_ms", "health p50 ms", ".1f"),
        ("health_p99_ms", "p99", ".1f"),
        ("health_max_ms", "worst", ".1f"),
        ("probes", "probes", ".0f"),
        ("answers", "answers", ""),
        ("unanswered", "given up", ".0f"),
        ("bursts", "bursts", ".0f"),
        ("wall_s", "s each", ".2f"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_long_arguments,
    measure=_long,
    remarks=_long_remarks,
    draw=_long_draw,
    num_axes=2,
)


# ---- ttft --------------------------------------------------------------------------------------

_ROUTED, _DIRECT = "through the router", "gRPC client"
# Different prompts, made before sending; then the first comes again.
_PROMPTS = 200


def _ttft_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt-words", type=positive_int, default=1000, metavar="N",
        help="about a token each (default: %(default)s)")  # fmt: skip
    add(
        "--output-tokens", type=positive_int, default=64, metavar="N", help="(default: %(default)s)"
    )
    add("--sequences", type=positive_int, default=128, metavar="N",
        help="that the shard runs at most (default: %(default)s)")  # fmt: skip
    add("--load", type=positive, default=0.5, metavar="SHARE",
        help="of what that shard could serve (default: %(default)s)")  # fmt: skip


def _ttft(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    # A request takes a step for each token, and two steps before the first.
    capacity = args.sequences / (1e-3 * args.step_ms * (args.output_tokens + 2))
    rate = args.load * capacity
    # Prompts never wait for each other.
    budget = ("--max-num-batched-tokens", 65_536, "--max-prefill-tokens", 32_768)
    flags = shard_flags(args, "--max-num-seqs", args.sequences, *budget)
    with serving(folder, flags, router_flags(args), pin=args.pin) as servers:
        for number in range(args.rounds):
            for case in (_ROUTED, _DIRECT):
                row = _first_tokens(servers, case, rate, number, args)
                yield {"case": case, "round": number, "rate": rate, **row}


def _first_tokens(
    servers: Servers, case: str, rate: float, seed: int, args: argparse.Namespace
) -> Row:
    """Measure a case; arrivals are the same in both."""
    arrivals = Arrivals(rate, 1.0, args.seconds, seed, _PATIENCE_S)
    load: Load
    if case == _ROUTED:
        requests = [
            chat(_words(args.prompt_words, 1000 * seed + index), stream=True,
                 max_tokens=args.output_tokens)
            for index in range(_PROMPTS)
        ]  # fmt: skip
        load = Load(loads.open_loop, servers.port, requests, arrivals)
    else:
        arguments = (servers.addresses[0], args.prompt_words, args.output_tokens)
        load = Load(loads.fleet_open_loop, *arguments, _PROMPTS, arrivals)
    return _measured(servers, load, args)


def _ttft_remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    routed, direct = of_case(rows, _ROUTED), of_case(rows, _DIRECT)
    p50, p99 = (routed[key] - direct[key] for key in ("ttft_p50_ms", "ttft_p99_ms"))
    return [f"added by the router: p50 {p50:.2f} ms, p99 {p99:.2f} ms, at "
            f"{routed['rate']:.1f} requests a second"]  # fmt: skip


def _ttft_draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    for case, color in ((_ROUTED, "C1"), (_DIRECT, "C0")):
        rounds = [row for row in every if row["case"] == case]
        figures.distributions(axes[0], {case: rounds[0]["ttfts_ms"]}, "time to first token, ms")
        for line in axes[0].lines[-1:]:
            line.set_color(color)
    axes[0].legend()
    figures.bars(axes[1], rows, "ttft_p99_ms", "time to first token p99, ms")


TTFT = Scenario(
    help="what the router adds to the time to the first token",
    description="""\
Time to the first token at a share of what the shard can serve, at random arrivals, through the
router from text and through the gRPC client from token ids.""",
    columns=(
        ("case", "case", ""),
        ("requests", "requests", ".0f"),
        ("failed", "failed", ".0f"),
        ("hung", "hung", ".0f"),
        ("ttft_p50_ms", "TTFT p50 ms", ".2f"),
        ("ttft_p99_ms", "p99", ".2f"),
        ("e2e_p50_ms", "whole p50 ms", ".0f"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_ttft_arguments,
    measure=_ttft,
    remarks=_ttft_remarks,
    draw=_ttft_draw,
    num_axes=2,
)


# ---- overload ----------------------------------------------------------------------------------

_AT_CAPACITY, _BEYOND = "at capacity", "beyond it"
_POLITE, _BESIDE_GREEDY = "nine polite keys", "beside a greedy one"
_BESIDE_BOUNDED = "beside a greedy one, bounded"
_CROWD, _GREEDY = "crowd", "greedy"
_POLITE_KEYS = tuple(f"polite{number}" for number in range(9))
# The greedy key sends this much longer than the measured window.
_MARGIN_S = 3.0


def _count(text: str) -> int:
    """Parse an argument."""
    return 0 if text == "0" else positive_int(text)


def _overload_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sequences", type=positive_int, default=64, metavar="N",
        help="that shard and router run at once (default: %(default)s)")  # fmt: skip
    add("--queued", type=_count, default=16, metavar="N",
        help="that the router lets wait besides (default: %(default)s)")  # fmt: skip
    add(
        "--output-tokens", type=positive_int, default=50, metavar="N", help="(default: %(default)s)"
    )
    add("--factor", type=positive, default=3.0, metavar="X",
        help="requests a second, over those at capacity (default: %(default)g)")  # fmt: skip
    add("--polite", type=positive, default=0.8, metavar="SHARE",
        help="of a tenth of the capacity, for each polite key (default: %(default)g)")  # fmt: skip


def _overload(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    flags = shard_flags(args, "--max-num-seqs", args.sequences)
    queue = ("--max-queued-requests", args.queued)
    keys = ("--api-keys-file", write_keys(folder / "keys.toml", _CROWD, _GREEDY, *_POLITE_KEYS))
    bounds = router_flags(args, "--max-concurrent-requests", args.sequences, *queue, *keys)
    requests = _of_several_lengths(args, _CROWD)
    warmup_s = 4e-3 * args.step_ms * args.output_tokens
    with serving(folder, flags, bounds, pin=args.pin) as servers:
        for number in range(args.rounds):
            at_once = args.sequences + args.queued
            calm = (servers.port, requests, at_once, warmup_s, args.seconds)
            row = _measured(servers, Load(loads.closed_loop_for, *calm), args)
            yield {"case": _AT_CAPACITY, "round": number, **row}
            capacity = row["goodput"]
            crowd = Arrivals(args.factor * capacity, warmup_s, args.seconds, number, _PATIENCE_S)
            row = _measured(servers, Load(loads.open_loop, servers.port, requests, crowd), args)
            yield {"case": _BEYOND, "round": number, "rate": crowd.rate, **row}
            for case in (_POLITE, _BESIDE_GREEDY):
                row = _by_keys(servers, case, capacity, number, args)
                yield {"case": case, "round": number, **row}
    key_bound = ("--max-concurrent-requests-per-key", max(1, args.sequences // 4))
    bounds = router_flags(args, *map(str, key_bound), *bounds)
    with serving(folder, flags, bounds, pin=args.pin) as servers:
        for number in range(args.rounds):
            row = _by_keys(servers, _BESIDE_BOUNDED, capacity, number, args)
            yield {"case": _BESIDE_BOUNDED, "round": number, **row}


def _of_several_lengths(args: argparse.Namespace, *keys: str) -> list[bytes]:
    """Return requests of different lengths, so that answers neither begin nor end together."""
    lengths = range(max(1, args.output_tokens // 2), args.output_tokens * 3 // 2 + 1)
    rng = random.Random(0)
    whose = itertools.cycle(keys)
    return [chat(stream=True, max_tokens=rng.choice(lengths), key=next(whose)) for _ in range(500)]


def _by_keys(
    servers: Servers, case: str, capacity: float, seed: int, args: argparse.Namespace
) -> Row:
    """Measure the polite keys' requests."""
    warmup_s = 4e-3 * args.step_ms * args.output_tokens
    polite = _of_several_lengths(args, *_POLITE_KEYS)
    rate = args.polite * capacity * len(_POLITE_KEYS) / (len(_POLITE_KEYS) + 1)
    arrivals = Arrivals(rate, warmup_s, args.seconds, seed, _PATIENCE_S)
    with contextlib.ExitStack() as stack:
        flood = None
        if case != _POLITE:
            greedy = _of_several_lengths(args, _GREEDY)
            rate, seconds = args.factor * capacity, args.seconds + _MARGIN_S
            torrent = Arrivals(rate, warmup_s, seconds, seed + 1, _PATIENCE_S)
            flood = stack.enter_context(Load(loads.open_loop, servers.port, greedy, torrent))
            flood.wait_ready()
        row = _measured(servers, Load(loads.open_loop, servers.port, polite, arrivals), args)
        if flood is not None:
            row["greedy"] = flood.result(2 * args.seconds + 2 * _PATIENCE_S)["goodput"]
        return {**row, "rate": arrivals.rate}


def _overload_remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    crowd, greedy = of_case(rows, _BEYOND), of_case(rows, _BESIDE_GREEDY)
    alone, bounded = of_case(rows, _POLITE), of_case(rows, _BESIDE_BOUNDED)
    return [
        f"at {crowd['rate']:.0f} requests a second, of those at capacity: "
        + _ratios(crowd, of_case(rows, _AT_CAPACITY)),
        f"{crowd['hung']:g} hung, {crowd['failed']:g} failed otherwise than with 429",
        f"polite keys at {greedy['rate']:.0f} requests a second, beside the greedy one, of those "
        f"alone: {_ratios(greedy, alone)}",
        f"of theirs {greedy['refused']:g} were refused; the greedy one got {greedy['greedy']:.1f} "
        "answers a second",
        f"and where no key may have more than a quarter of the places: {_ratios(bounded, alone)}",
    ]


def _ratios(row: Row, other: Row) -> str:
    shown = (("TTFT p50", "ttft_p50_ms"), ("TTFT p99", "ttft_p99_ms"),
             ("whole p50", "e2e_p50_ms"), ("whole p99", "e2e_p99_ms"),
             ("goodput", "goodput"))  # fmt: skip
    ratios = ((name, ratio(row[key] or math.nan, other[key] or math.nan)) for name, key in shown)
    return ", ".join(f"{name} {value:.3f}" for name, value in ratios)


def _overload_draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    curves = {row["case"]: row["ttfts_ms"] for row in rows}
    figures.distributions(axes[0], curves, "time to first token of the accepted, ms")
    figures.bars(axes[1], rows, "e2e_p99_ms", "whole answer p99, ms")
    figures.bars(axes[2], rows, "goodput", "accepted requests/s")


OVERLOAD = Scenario(
    help="more requests than can be served",
    description="""\
As many requests at once as the router admits, each followed by the next, and then so many times as
many a second at random moments: latency of those that are accepted, and of refusals with 429. Then
nine keys that send less than their part at random moments, alone and beside a tenth that sends as
many as all did before: what became of the nine, and again where no key may have more than a quarter
of the places.""",
    columns=(
        ("case", "case", ""),
        ("accepted", "accepted", ".0f"),
        ("refused", "429", ".0f"),
        ("failed", "failed", ".0f"),
        ("hung", "hung", ".0f"),
        ("goodput", "accepted/s", ".1f"),
        ("ttft_p50_ms", "TTFT p50 ms", ".1f"),
        ("ttft_p99_ms", "p99", ".1f"),
        ("e2e_p50_ms", "whole p50 ms", ".0f"),
        ("e2e_p99_ms", "p99", ".0f"),
        ("refusal_p50_ms", "429 p50 ms", ".1f"),
        ("refusal_p99_ms", "p99", ".1f"),
        ("refusal_max_ms", "worst", ".1f"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_overload_arguments,
    measure=_overload,
    remarks=_overload_remarks,
    draw=_overload_draw,
    num_axes=3,
)
