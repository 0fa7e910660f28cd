"""`attack`: honest requests beside clients that tie up a router's resources."""

from __future__ import annotations

import argparse
import contextlib
import json
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.certificates import Authority
from support.processes import ask

from benchmarks.router_bench import figures, loads
from benchmarks.router_bench.attackers import ATTACKED_MODEL, Target, attack
from benchmarks.router_bench.figures import Row, of_case, percentile
from benchmarks.router_bench.http_load import MODEL, chat, get, write_keys
from benchmarks.router_bench.loads import Arrivals
from benchmarks.router_bench.scenario import (
    LOAD_COLUMNS,
    Scenario,
    positive,
    ratio,
    router_flags,
    shard_flags,
)
from benchmarks.router_bench.servers import Load, MemoryWatch, Meter, Servers, memory_bytes, serving

CALM, ATTACKED = "alone", "attacked"
_HONEST, _ATTACKER = "honest", "mallory"
_OUTPUT_TOKENS = 32
# A text of over 64 kB, for a text process.
_LONG_WORDS = 15_000
_LONG_RATE = 1.0
_WARMUP_S = 2.0
_PATIENCE_S = 30.0
_PROBE_PERIOD_S = 0.01
_LOOK_PERIOD_S = 0.1
# Resources that are not free by then are lost.
_GIVE_BACK_S = 60.0


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate",
        type=positive,
        default=20.0,
        metavar="X",
        help="honest requests a second (default: %(default)g)",
    )


def _measure(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    with serving_site(args, folder) as site:
        stored = site.store()
        for number in range(args.rounds):
            for case in (CALM, ATTACKED):
                row = window(site, case, number, args)
                yield {"case": case, "round": number, **row, "stored": site.has(stored)}


@contextlib.contextmanager
def serving_site(args: argparse.Namespace, folder: Path) -> Iterator[Site]:
    """Start a shard, and a router with keys and TLS."""
    authority = Authority(folder, "bench")
    pair = authority.issue("127.0.0.1")
    shard = shard_flags(
        args, *("--max-model-len", 65_536, "--max-num-seqs", 512, "--kv-blocks", 200_000)
    )
    router = router_flags(
        args,
        *("--api-keys-file", write_keys(folder / "keys.toml", _HONEST, _ATTACKER)),
        *("--max-concurrent-requests-per-key", 64, "--response-store-bytes", 32 * 2**20),
        "--trust-request-chat-template",
        *pair.server_flags,
    )
    with serving(folder, shard, router, models=(MODEL, ATTACKED_MODEL), pin=args.pin) as servers:
        yield Site(servers, authority)


class Site:
    """The servers, and requests to the router."""

    def __init__(self, servers: Servers, authority: Authority) -> None:
        self.servers = servers
        self.ca_file = authority.file
        self._context = ssl.create_default_context(cafile=str(authority.file))
        self._url = f"https://127.0.0.1:{servers.port}"

    def ask(self, path: str, body: object = None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {_HONEST}"}
        return ask(self._url + path, body, headers, context=self._context)

    def store(self) -> str:
        """Store a response with the honest key; return its id."""
        body = {"model": MODEL, "input": "keep this", "max_output_tokens": 4}
        status, text = self.ask("/v1/responses", body)
        assert status == 200, text
        return str(json.loads(text)["id"])

    def has(self, stored: str) -> bool:
        return self.ask(f"/v1/responses/{stored}")[0] == 200

    def held(self) -> dict[str, float]:
        """Return the router's used resources, and its open connections except this one."""
        _, text = self.ask("/metrics")
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] not in "#")
        router = self.servers.processes()["router"][0]
        here = self.servers.port
        open_now = sum(
            each.laddr.port == here and each.status == "ESTABLISHED"
            for each in router.net_connections("tcp")
        )
        return {
            "in flight": float(values["penstock_router_sequences_in_flight"]),
            "queued": float(values["penstock_router_sequences_queued"]),
            "bytes": float(values["penstock_router_buffered_bytes"]),
            "connections": open_now - 1,
        }


def _memory(servers: Servers) -> dict[str, int]:
    """Return the bytes of the router, and of the router with its text processes."""
    processes = servers.processes()["router"]
    return {"router": memory_bytes(processes[:1]), "all": memory_bytes(processes)}


def window(site: Site, case: str, seed: int, args: argparse.Namespace) -> Row:
    """Measure honest requests, and the resources that the router used and freed."""
    servers = site.servers
    before = site.held()
    with ExitStack() as stack:
        watch = stack.enter_context(MemoryWatch(lambda: _memory(servers)))
        attackers: list[Load] = []
        if case == ATTACKED:
            attackers = [stack.enter_context(load) for load in _attackers(site, args)]
            for load in attackers:
                load.wait_ready()
        row = _honest(site, seed, args)
        for load, key in zip(attackers, ("with a key", "without"), strict=False):
            row[key] = load.result(_PATIENCE_S)
    gave_back_s = _gave_back_s(site, before)
    before_mb = watch.before_bytes["router"] / 2**20
    return {
        **row,
        "router_mb": before_mb,
        "grown_mb": watch.grown_mb("router"),
        "grown_mb_all": watch.grown_mb("all"),
        "grown_after_mb": _memory(servers)["router"] / 2**20 - before_mb,
        "gave_back_s": gave_back_s,
    }


def _attackers(site: Site, args: argparse.Namespace) -> list[Load]:
    """Return attackers with and without a key, at different addresses."""
    seconds = args.seconds + _WARMUP_S
    who = ((_ATTACKER, "127.0.0.2", "127.0.0.4"), ("", "127.0.0.3", "127.0.0.5"))
    return [
        Load(attack, Target(site.servers.port, site.ca_file, key, address, silent), seconds)
        for key, address, silent in who
    ]


def _honest(site: Site, seed: int, args: argparse.Namespace) -> Row:
    """Send short requests, long requests and probes."""
    port, ca_file = site.servers.port, site.ca_file
    short = [chat(stream=True, max_tokens=_OUTPUT_TOKENS, key=_HONEST)]
    long = [chat("word " * _LONG_WORDS, stream=True, max_tokens=1, key=_HONEST)]
    arrivals = Arrivals(args.rate, _WARMUP_S, args.seconds, seed, _PATIENCE_S)
    rarely = Arrivals(_LONG_RATE, _WARMUP_S, args.seconds, seed + 1, _PATIENCE_S)
    with (
        Load(loads.open_loop, port, short, arrivals, ca_file) as load,
        Load(loads.open_loop, port, long, rarely, ca_file) as long_load,
        Load(loads.probe, port, get("/live"), _PROBE_PERIOD_S, ca_file) as probe,
    ):
        for each in (load, long_load, probe):
            each.wait_ready()
        meter = Meter(site.servers, load=load.process)
        row: Row = load.result(args.seconds + 2 * _PATIENCE_S)
        row |= meter.read().cores()
        long_row = long_load.result(args.seconds + 2 * _PATIENCE_S)
        probe.stop()
        took_s = [each_s for _, each_s in probe.result(_PATIENCE_S)]
    return {
        **row,
        "live_p99_ms": 1e3 * percentile(took_s, 0.99),
        "live_max_ms": 1e3 * max(took_s),
        "long_accepted": long_row["accepted"],
        "long_lost": long_row["requests"] - long_row["accepted"],
        **{f"long_{why}": long_row[why] for why in ("refused", "failed", "hung")},
        "long_ttft_p99_ms": long_row["ttft_p99_ms"],
    }


def _gave_back_s(site: Site, before: dict[str, float]) -> float:
    """Return the seconds until no more resources are used than before."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < _GIVE_BACK_S:
        held = site.held()
        if all(held[name] <= before[name] for name in held):
            return time.monotonic() - begun_s
        time.sleep(_LOOK_PERIOD_S)
    return float("inf")


def _remarks(rows: list[Row], args: argparse.Namespace) -> list[str]:
    alone, attacked = of_case(rows, CALM), of_case(rows, ATTACKED)
    names = (("TTFT p99", "ttft_p99_ms"), ("gap p99", "gap_p99_ms"), ("/live p99", "live_p99_ms"))
    ratios = (f"{name} {ratio(attacked[key], alone[key]):.2f}" for name, key in names)
    return [
        f"attacked over alone: {', '.join(ratios)}",
        f"the router's memory grew by {attacked['grown_mb']:.0f} MB at most, by "
        f"{attacked['grown_mb_all']:.0f} MB with its text processes; everything was given back "
        f"after {attacked['gave_back_s']:.1f} s, and the honest response was "
        + ("still stored" if attacked["stored"] else "gone"),
        f"who had a key saw {attacked['with a key']}",
        f"who had none saw {attacked['without']}",
    ]


def _draw(rows: list[Row], every: list[Row], axes: list[Any]) -> None:
    figures.bars(axes[0], rows, "ttft_p99_ms", "time to first token p99, ms")
    figures.bars(axes[1], rows, "live_p99_ms", "GET /live p99, ms")
    axes[1].set_yticklabels([])


ATTACK = Scenario(
    help="honest requests beside clients that tie up all that a router lends",
    description="""\
Honest requests at random moments over TLS, alone and beside two attackers, one with a key and one
without. Each of the two does all of this at once: bodies that unpack to a gigabyte, answers and
resumable streams that are not read, long bodies a byte at a time, connections without a handshake,
chat templates that never end, and responses that fill the store. What they ask of shards goes to
one of their own: this measures the router.""",
    columns=(
        ("case", "case", ""),
        ("accepted", "accepted", ".0f"),
        ("refused", "429", ".0f"),
        ("failed", "failed", ".0f"),
        ("hung", "hung", ".0f"),
        ("ttft_p50_ms", "TTFT p50 ms", ".1f"),
        ("ttft_p99_ms", "p99", ".1f"),
        ("gap_p50_ms", "gap p50 ms", ".1f"),
        ("gap_p99_ms", "p99", ".1f"),
        ("live_p99_ms", "/live p99 ms", ".1f"),
        ("live_max_ms", "worst", ".1f"),
        ("long_accepted", "long", ".0f"),
        ("long_lost", "lost", ".0f"),
        ("grown_mb", "grown MB", ".0f"),
        ("gave_back_s", "given back s", ".1f"),
        *LOAD_COLUMNS,
    ),
    add_arguments=_arguments,
    measure=_measure,
    remarks=_remarks,
    draw=_draw,
    num_axes=2,
)
