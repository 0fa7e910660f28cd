"""`costly`: honest chats with a small model beside one client's expensive requests."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import psutil
from support.image_site import write_seeing_model
from support.processes import wait_until

from benchmarks.router_bench import figures, loads
from benchmarks.router_bench.costly_requests import ATTACKS, Attack, asked_too, send
from benchmarks.router_bench.figures import Row, of_case
from benchmarks.router_bench.http_load import MODEL, chat, get, write_keys
from benchmarks.router_bench.loads import Timed, Window
from benchmarks.router_bench.scenario import LOAD_COLUMNS, Scenario, positive, ratio, router_flags
from benchmarks.router_bench.servers import Load, MemoryWatch, Meter, Servers, memory_bytes, serving
from penstock_cli.arguments import positive_int

_HONEST, _ATTACKER = "honest", "mallory"
ALONE, ATTACKED = "alone", "attacked"
# About 3 M parameters with embeddings.
_DECODER = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 10,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}
# Tokens of streams, and of chats beside them.
_STREAM_TOKENS = range(128, 385)
_CHAT_TOKENS = 16
# A text of over 64 kB, for a text process, cut to the length of a chat's prompt.
_LONG_WORDS = 15_000
_LONG_TOKENS = 32
_LONG_PERIOD_S = 2.0
# For the start of a window's loads.
_START_S = 6.0
_WARMUP_S = 3.0
_PATIENCE_S = 30.0
_PROBE_PERIOD_S = 0.05
# For the end of a window's work, such as waiting constraints.
_SETTLE_S = 60.0

_MAX_RATIO = 1.5
# Lower latencies meet the goal, whatever they were alone. A long body may wait for another client's
# task in the text process.
_FLOOR_MS = 50.0
_LONG_FLOOR_MS = 250.0
_MAX_LIVE_MS = 20.0
_MAX_GROWN_MB = 200.0
_LATENCIES = (
    ("ttft_p99_ms", "first token p99", _FLOOR_MS),
    ("gap_p99_ms", "gap p99", _FLOOR_MS),
    ("long_p99_ms", "first token of long bodies p99", _LONG_FLOOR_MS),
    ("same_p99_ms", "first token of what the attacker asks for too p99", _FLOOR_MS),
)


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--attacks", type=_names, default=list(ATTACKS), metavar="NAME[,...]",
        help=f"which of {', '.join(ATTACKS)} (default: all)")  # fmt: skip
    add("--streams", type=positive_int, default=32, metavar="N",
        help="honest ones, all the time (default: %(default)s)")  # fmt: skip
    add("--rate", type=positive, default=8.0, metavar="X",
        help="honest chats a second beside them (default: %(default)g)")  # fmt: skip


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ATTACKS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ATTACKS)}")
    return names


def _measure(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    model = folder / "model"
    write_seeing_model(model, "qwen3_vl", _DECODER)
    shard = ["--served-model-name", MODEL, "--kv-memory", "256M", *args.shard_flags]
    router = router_flags(
        args,
        *("--api-keys-file", write_keys(folder / "keys.toml", _HONEST, _ATTACKER)),
        *("--tool-call-parser", "pythonic"),
    )
    for name in args.attacks:
        # Each attack gets new servers.
        with serving(folder, shard, router, pin=args.pin, model=model) as servers:
            for number in range(args.rounds):
                for case in (ALONE, ATTACKED):
                    row = _window(servers, ATTACKS[name], case, number, args)
                    yield {"case": f"{name}, {case}", "round": number, **row}


def _window(
    servers: Servers, attack: Attack, case: str, number: int, args: argparse.Namespace
) -> Row:
    """Measure honest requests, and the memory of router and shard."""
    window = Window(time.monotonic() + _START_S, _WARMUP_S, args.seconds, _PATIENCE_S)
    # Shared texts are new in each window.
    salt = f"{case}{number}"
    with ExitStack() as stack:
        watch = stack.enter_context(MemoryWatch(lambda: _memory(servers)))
        attacking = None
        if case == ATTACKED:
            sending = Load(send, servers.port, attack, _ATTACKER, salt, window)
            attacking = stack.enter_context(sending)
        row = _honest(servers, attack, salt, window, args)
        if attacking is not None:
            attacking.wait_ready()
            row["attacker"] = attacking.result(_PATIENCE_S)
    settled_s = _settle(servers)
    grown = {f"{part}_grown_mb": watch.grown_mb(part) for part in watch.before_bytes}
    before = {f"{part}_mb": size / 2**20 for part, size in watch.before_bytes.items()}
    return {**row, **before, **grown, "settled_s": settled_s}


def _memory(servers: Servers) -> dict[str, int]:
    """Return the bytes of all processes of the router, and of the shard."""
    processes = servers.processes()
    return {
        "router": memory_bytes(processes["router"]),
        "shard": memory_bytes([*processes["shard"], *processes["engine"]]),
    }


def _honest(
    servers: Servers, attack: Attack, salt: str, window: Window, args: argparse.Namespace
) -> Row:
    """Send streams, chats, long bodies, requests like the attacker's, and probes."""
    rng = random.Random(salt)
    kinds = {
        "chat": _at_random(args.rate, rng, window),
        "long": _evenly(_long(), _LONG_PERIOD_S, window),
        "same": asked_too(attack, _HONEST, salt, window),
    }
    streams = [_stream(rng) for _ in range(args.streams)]
    probes = {"live": _evenly(get("/live"), _PROBE_PERIOD_S, window)}
    with (
        Load(loads.users, servers.port, streams, kinds, window) as load,
        Load(loads.users, servers.port, [], probes, window) as probe,
    ):
        load.wait_ready()
        probe.wait_ready()
        time.sleep(max(0.0, window.from_s - time.monotonic()))
        meter = Meter(servers, load=load.process)
        time.sleep(max(0.0, window.to_s - time.monotonic()))
        cores = meter.read().cores()
        found = load.result(2 * _PATIENCE_S)
        live = probe.result(2 * _PATIENCE_S)["live"]
    row: Row = {**found["chat"], **cores, "live_p99_ms": live["e2e_p99_ms"]}
    for kind in ("long", "same"):
        row |= {f"{kind}_{of}_ms": found[kind][f"ttft_{of}_ms"] for of in ("p50", "p99")}
        row[f"{kind}_accepted"] = found[kind]["accepted"]
    row["errors"] = sum(_errors(each) for each in (*found.values(), live))
    return row


def _errors(found: Row) -> int:
    return int(found["failed"] + found["refused"] + found["hung"])


def _at_random(rate: float, rng: random.Random, window: Window) -> Timed:
    timed, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < window.warmup_s + window.seconds:
        timed.append((at_s, chat(stream=True, max_tokens=_CHAT_TOKENS, key=_HONEST)))
    return timed


def _evenly(request: bytes, period_s: float, window: Window) -> Timed:
    count = int((window.warmup_s + window.seconds) / period_s)
    return [(number * period_s, request) for number in range(count)]


def _long() -> bytes:
    words, cut = "word " * _LONG_WORDS, _LONG_TOKENS
    return chat(words, stream=True, key=_HONEST, truncate_prompt_tokens=cut, max_tokens=1)


def _stream(rng: random.Random) -> Timed:
    """Return requests of different lengths, which begin at a random time."""
    begin_s = rng.uniform(0, _WARMUP_S / 2)
    lengths = (rng.choice(_STREAM_TOKENS) for _ in range(8))
    return [(begin_s, chat(stream=True, max_tokens=each, key=_HONEST)) for each in lengths]


def _settle(servers: Servers) -> float:
    """Return the seconds until the router has no request; infinity after `_SETTLE_S`."""
    try:
        return wait_until(lambda: _is_idle(servers), timeout_s=_SETTLE_S, what="an idle router")
    except AssertionError:
        return float("inf")


def _is_idle(servers: Servers) -> bool:
    _, text = servers.router.ask("/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] not in "#")
    names = ("penstock_router_sequences_in_flight", "penstock_router_sequences_queued")
    return not any(float(values[name]) for name in names)


def _remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    remarks = []
    for name in args.attacks:
        alone, attacked = (of_case(rows, f"{name}, {case}") for case in (ALONE, ATTACKED))
        found = shortfalls(alone, attacked)
        remarks.append(f"{name}: {'; '.join(found) if found else 'pass'}")
        remarks.append(
            f"    first token p99 {_times(alone, attacked, 'ttft_p99_ms')}, "
            f"gap p99 {_times(alone, attacked, 'gap_p99_ms')} of alone, where the machine was "
            f"{_busy(alone)}; the attacker saw {attacked['attacker']}"
        )
    return remarks


def _busy(row: Row) -> str:
    others, own = row["others_cores"], sum(row[part] for part, *_ in LOAD_COLUMNS[:-1])
    share = 100 / (psutil.cpu_count() or 1)
    return f"{share * own:.0f} % busy with this and {share * others:.0f} % with others"


def _times(alone: Row, attacked: Row, key: str) -> str:
    if not (alone[key] and attacked[key]):
        return "nothing"
    return f"{ratio(attacked[key], alone[key]):.2f}"


def shortfalls(alone: Row, attacked: Row) -> list[str]:
    """List missed goals, with value and bound."""
    found = []
    for key, name, floor_ms in _LATENCIES:
        if not alone[key]:
            continue
        value = attacked[key] or float("inf")
        bound = max(floor_ms, _MAX_RATIO * alone[key])
        if value > bound:
            found.append(f"short: {name} {value:.0f} ms, at most {bound:.0f}")
    live_ms = attacked["live_p99_ms"] or float("inf")
    if live_ms >= _MAX_LIVE_MS:
        found.append(f"short: /live p99 {live_ms:.0f} ms, below {_MAX_LIVE_MS:.0f}")
    for part in ("router", "shard"):
        grown_mb = attacked[f"{part}_grown_mb"]
        if grown_mb > _MAX_GROWN_MB:
            found.append(
                f"short: the {part} grew by {grown_mb:.0f} MB, at most {_MAX_GROWN_MB:.0f}"
            )
    if attacked["errors"]:
        found.append(f"short: {attacked['errors']:.0f} honest requests failed, at most 0")
    return found


def _draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    figures.bars(axes[0], rows, "ttft_p99_ms", "time to first token p99, ms")
    figures.bars(axes[1], rows, "gap_p99_ms", "between tokens p99, ms")
    figures.bars(axes[2], rows, "live_p99_ms", "GET /live p99, ms")
    for each in axes[1:]:
        each.set_yticklabels([])


COSTLY = Scenario(
    help="honest chats of a small model beside requests that cost much",
    description="""\
Streams of a model with 3 M parameters, chats, long bodies and probes, of one key, alone and beside
the requests of another key that cost much, of each kind in turn: unclosed links to images; a
grammar of which each text has many readings; a tool with 2,000 optional properties; texts of 4 MB;
slow constraints and large images of which the honest ask for some too. The attacker's own process
runs at the lowest priority. 'errors' are honest requests and probes that failed, were refused or
hung. Memory is that of all processes of a part; of what they share each has its part.""",
    columns=(
        ("case", "case", ""),
        ("accepted", "accepted", ".0f"),
        ("errors", "errors", ".0f"),
        ("ttft_p50_ms", "TTFT p50 ms", ".0f"),
        ("ttft_p99_ms", "p99", ".0f"),
        ("gap_p50_ms", "gap p50 ms", ".1f"),
        ("gap_p99_ms", "p99", ".1f"),
        ("live_p99_ms", "/live p99 ms", ".1f"),
        ("long_p50_ms", "long p50 ms", ".0f"),
        ("long_p99_ms", "p99", ".0f"),
        ("same_p50_ms", "same p50 ms", ".0f"),
        ("same_p99_ms", "p99", ".0f"),
        ("settled_s", "settled s", ".1f"),
        ("router_mb", "router MB", ".0f"),
        ("router_grown_mb", "grown", ".0f"),
        ("shard_mb", "shard MB", ".0f"),
        ("shard_grown_mb", "grown", ".0f"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_arguments,
    measure=_measure,
    remarks=_remarks,
    draw=_draw,
    num_axes=3,
)
