"""Compares penstock and other servers under the same load, in turns, on the same cores.

    python benchmarks/peers.py --peers DIR --rounds 3 --output peers.json

See peers.md for how to put the others into DIR, and for results. Missing servers are named and left
out. In each round, each contender is started, warmed up, loaded by `penstock bench` and stopped. A
run that the machine's other work disturbs is repeated. Prints a table of medians in Markdown, and
draws them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peer_servers import CASES, CONTENDERS, Case, Contender
from penstock_common.version import how_to_install

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
QUIET_S = 3.0


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings of a run of this script."""

    peers: Path
    models: Path
    cores: tuple[int, ...]
    threads: int
    case_name: str
    max_other: float
    patience_s: float
    retries: int
    logs: Path

    @property
    def case(self) -> Case:
        return CASES[self.case_name]

    def values(self) -> dict[str, Any]:
        """The values for a contender's command line."""
        slots = max(self.case.streams)
        per_request = self.case.prompt_tokens + self.case.output_tokens
        return {
            "peers": self.peers,
            "model": self.models / self.case_name,
            "threads": self.threads,
            "cpus": ",".join(map(str, self.cores[: self.threads])),
            "slots": slots,
            # A prompt of n words may have a few more tokens.
            "context": slots * (per_request + 64),
        }


def main() -> None:
    args = parse_args()
    # Like Ctrl-C, so that no server is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = present(args)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            args.peers.resolve(),
            (args.models or args.peers / "models").resolve(),
            args.cores,
            args.threads or len(args.cores),
            args.case,
            args.max_other,
            args.patience,
            args.retries,
            args.logs or Path(scratch),
        )
        runs: list[dict[str, Any]] = []
        try:
            runs.extend(run_rounds(bench, chosen, args.rounds))
        finally:
            # Also results before Ctrl-C.
            if args.output:
                report = {"machine": machine(bench), "runs": runs}
                args.output.write_text(json.dumps(report, indent=2) + "\n")
            print(markdown(bench, runs))
            if args.plot and runs:
                plot(bench, runs, args.plot)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--peers", type=Path, default=Path(os.environ.get("PEERS", "peers")), metavar="DIR",
        help="where the other servers are (default: PEERS)")  # fmt: skip
    add("--models", type=Path, metavar="DIR", help="default: models in there")
    add("--case", choices=CASES, default="130m", help="model and load (default: %(default)s)")
    add("--only", default="", metavar="NAMES", help="contenders, as in 'penstock f16,vLLM f32'")
    add("--cores", type=cpu_list, default=tuple(sorted(os.sched_getaffinity(0))), metavar="N,N",
        help="that servers and load may use (default: all)")  # fmt: skip
    add("--threads", type=int, help="compute threads of each server (default: one a core)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--max-other", type=float, default=0.05, metavar="CORES",
        help="a run with more by other processes is disturbed (default: %(default)s)")  # fmt: skip
    add("--retries", type=int, default=3, metavar="N",
        help="repeat a disturbed run, then take the best (default: %(default)s)")  # fmt: skip
    add("--patience", type=float, default=60.0, metavar="S",
        help="wait so long for a quiet machine before each run (default: %(default)s)")  # fmt: skip
    add("--logs", type=Path, metavar="DIR", help="keep what the servers print")
    add("--output", type=Path, metavar="FILE", help="every run as JSON")
    add("--plot", type=Path, metavar="FILE", help="tokens/s as PNG")
    args = parser.parse_args()
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error(f"--plot: needs matplotlib; {how_to_install('bench')}")
    return args


def cpu_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def present(args: argparse.Namespace) -> list[Contender]:
    """List the wanted contenders that exist."""
    names = [name.strip() for name in args.only.split(",") if name.strip()]
    unknown = set(names) - {contender.name for contender in CONTENDERS}
    if unknown:
        raise SystemExit(f"--only: no contender {', '.join(sorted(unknown))}; there are "
                         f"{', '.join(contender.name for contender in CONTENDERS)}")  # fmt: skip
    chosen = []
    for contender in CONTENDERS:
        if names and contender.name not in names:
            continue
        if (args.peers / contender.needs).exists():
            chosen.append(contender)
        else:
            print(f"{contender.name}: left out, {args.peers / contender.needs} is not there")
    return chosen


def run_rounds(
    bench: Bench, contenders: Sequence[Contender], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield every run, and print it."""
    for round_ in range(rounds):
        for contender in contenders:
            try:
                with serving(bench, contender) as server:
                    warm_up(server)
                    for streams in bench.case.streams:
                        run = {"round": round_, **undisturbed(server, streams)}
                        print(one_line(run), flush=True)
                        yield run
            except ServerError as error:
                print(f"{contender.name}: {error}", flush=True)


def warm_up(server: RunningServer) -> None:
    """Send the largest number of streams, so that nothing is allocated or compiled later."""
    streams = max(server.bench.case.streams)
    server.load(streams, requests=streams, seed=time.time_ns() // 1_000_000)


class ServerError(Exception):
    """A server did not start, or answers wrongly."""


@dataclass(slots=True)
class RunningServer:
    contender: Contender
    bench: Bench
    process: psutil.Popen
    url: str
    ready_s: float

    def load(self, streams: int, *, requests: int, seed: int) -> dict[str, Any]:
        """Return the figures of `penstock bench`. Raises ServerError if a request failed."""
        case = self.bench.case
        values = self.bench.values()
        command = [
            *(sys.executable, "-m", "penstock_cli.main", "bench", "--json", "--url", self.url),
            *("--model", self.contender.model.format(**values), "--streams", str(streams)),
            *("--requests", str(requests), "--seed", str(seed)),
            *("--prompt-words", str(case.prompt_tokens)),
            *("--output-tokens", str(case.output_tokens)),
            *("--body", json.dumps({"temperature": 0, **self.contender.body})),
            *self.contender.bench_flags,
        ]
        done = subprocess.run(
            on_cores(self.bench.cores, command), capture_output=True, text=True, check=False
        )
        if not done.stdout:
            raise ServerError(f"the load failed: {done.stderr[-500:]}")
        summary: dict[str, Any] = json.loads(done.stdout)
        if summary["failed"]:
            raise ServerError(f"{summary['errors']}: {summary['first_error']}")
        return summary

    def tree(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_s(self, *, beside_vllm: bool = False) -> float:
        """Return CPU seconds of all processes, or of those beside vLLM's core and workers."""
        times = [
            process.cpu_times()
            for process in self.tree()
            if not (beside_vllm and "".join(process.cmdline()).startswith("VLLM::"))
        ]
        return sum(each.user + each.system for each in times)

    def memory_mb(self) -> tuple[float, float]:
        """Return the sum of resident memory, and the same with shared pages counted once."""
        full = [process.memory_full_info() for process in self.tree()]
        return sum(each.rss for each in full) / 1e6, sum(each.pss for each in full) / 1e6


@contextmanager
def serving(bench: Bench, contender: Contender) -> Iterator[RunningServer]:
    """Run the server in the context."""
    port, port2 = 18100, 18101
    values = {**bench.values(), "port": port, "port2": port2}
    command = shlex.split(contender.command.format(**values))
    environment = {key: value.format(**values) for key, value in contender.environment.items()}
    bench.logs.mkdir(parents=True, exist_ok=True)
    log_file = bench.logs / f"{contender.name.replace(' ', '-')}.log"
    with log_file.open("wb") as log:
        begin_s = time.monotonic()
        process = psutil.Popen(
            on_cores(bench.cores, command),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            start_new_session=True,
        )
    server = RunningServer(contender, bench, process, f"http://127.0.0.1:{port}", 0.0)
    try:
        wait_until_ready(server, log_file)
        server.ready_s = time.monotonic() - begin_s
        yield server
    finally:
        stop(server)


def on_cores(cores: Sequence[int], command: Sequence[str]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]


def wait_until_ready(server: RunningServer, log_file: Path) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_s:
        if server.process.poll() is not None:
            raise ServerError(f"ended at its start: {log_file.read_text(errors='replace')[-800:]}")
        with suppress(OSError, urllib.error.HTTPError):
            urllib.request.urlopen(server.url + "/health", timeout=2).close()
            return
        time.sleep(0.2)
    raise ServerError(f"not ready within {START_TIMEOUT_S:.0f} s")


def stop(server: RunningServer) -> None:
    """Terminate, then kill: no process may run beside the next server."""
    with suppress(psutil.NoSuchProcess):
        processes = server.tree()
        server.process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)


def undisturbed(server: RunningServer, streams: int) -> dict[str, Any]:
    """Return a run that others did not disturb, or the least disturbed one, which is marked."""
    runs: list[dict[str, Any]] = []
    while len(runs) <= server.bench.retries:
        wait_until_quiet(server)
        runs.append(measured(server, streams))
        if not runs[-1]["disturbed"]:
            return runs[-1]
        print(f"disturbed: {one_line(runs[-1])}", flush=True)
    return min(runs, key=lambda run: float(run["other_cores"]))


def wait_until_quiet(server: RunningServer) -> None:
    """Wait until other processes are quiet for QUIET_S, or patience ends."""
    give_up_s = time.monotonic() + server.bench.patience_s
    while time.monotonic() < give_up_s:
        busy_s, server_s = busy(), server.cpu_s()
        time.sleep(QUIET_S)
        other_s = busy() - busy_s - (server.cpu_s() - server_s)
        if other_s <= server.bench.max_other * QUIET_S:
            return


def measured(server: RunningServer, streams: int) -> dict[str, Any]:
    """Return figures and costs of a load. `other_cpu_s` excludes server and load."""
    requests = server.bench.case.requests(streams)
    # New prompts each time, because a prefix cache must find nothing.
    seed = time.time_ns() // 1_000_000
    begin_s, server_s, busy_s, load_s = time.monotonic(), server.cpu_s(), busy(), children_cpu_s()
    beside_s = server.cpu_s(beside_vllm=True)
    summary = server.load(streams, requests=requests, seed=seed)
    wall_s = time.monotonic() - begin_s
    beside_s = server.cpu_s(beside_vllm=True) - beside_s
    server_s, load_s = server.cpu_s() - server_s, children_cpu_s() - load_s
    other_s = busy() - busy_s - server_s - load_s
    rss_mb, pss_mb = server.memory_mb()
    return {
        "contender": server.contender.name,
        "streams": streams,
        "seed": seed,
        "disturbed": other_s > server.bench.max_other * wall_s,
        "other_cores": other_s / wall_s,
        "ready_s": server.ready_s,
        "rss_mb": rss_mb,
        "pss_mb": pss_mb,
        "server_cpu_s": server_s,
        "beside_us": 1e6 * beside_s / max(summary["output_tokens"], 1),
        "tokens_per_server_cpu_s": summary["output_tokens"] / max(server_s, 0.01),
        "load_cpu_s": load_s,
        "other_cpu_s": other_s,
        "bench": summary,
    }


def busy() -> float:
    """Return the machine's busy CPU seconds, with those that a hypervisor took away."""
    times = psutil.cpu_times()
    busy_s: float = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    return busy_s


def children_cpu_s() -> float:
    """Sum the CPU seconds of ended children: loads, and servers after their last run."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def one_line(run: dict[str, Any]) -> str:
    bench = run["bench"]
    return (
        f"round {run.get('round', '-')}  {run['contender']:<16} {run['streams']:>4} streams "
        f"{bench['output_tokens_per_s']:>8.1f} tokens/s  TTFT {bench['ttft_ms']['mean']:>7.0f} ms  "
        f"per token {bench['tpot_ms']['mean']:>6.1f} ms  CPU {run['server_cpu_s']:.1f} s, "
        f"load {run['load_cpu_s']:.1f} s, other {run['other_cpu_s']:.1f} s"
    )


# ---- The report --------------------------------------------------------------------------------


def markdown(bench: Bench, runs: Sequence[dict[str, Any]]) -> str:
    """Make a table for each number of streams: medians over rounds, and ratios to each penstock."""
    about = machine(bench)
    case = bench.case
    lines = [
        f"{bench.case_name}, {case.prompt_tokens} tokens in, {case.output_tokens} out, "
        f"{bench.threads} threads on cores {bench.cores}; {about['cpu']}, {about['date']}",
    ]
    for streams in case.streams:
        rows = [run for run in runs if run["streams"] == streams]
        lines += ["", f"{streams} streams", "", *table(rows)]
    return "\n".join(lines)


def plot(bench: Bench, runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a bar for each server and number of streams: the median of output tokens/s."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(9.0, 0.5 + 0.32 * len(bench.case.streams) * len({r["contender"] for r in runs})),
        layout="constrained",
    )
    for axes, streams in zip(
        figure.subplots(len(bench.case.streams), squeeze=False)[:, 0],
        bench.case.streams,
        strict=True,
    ):
        speeds: dict[str, list[float]] = {}
        for run in runs:
            if run["streams"] == streams:
                speeds.setdefault(run["contender"], []).append(run["bench"]["output_tokens_per_s"])
        medians = sorted((statistics.median(found), name) for name, found in speeds.items())
        colours = ["#c0392b" if name.startswith("penstock") else "#95a5a6" for _, name in medians]
        bars = axes.barh([name for _, name in medians], [speed for speed, _ in medians])
        for bar, colour in zip(bars, colours, strict=True):
            bar.set_color(colour)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set_title(f"{bench.case_name}, {streams} streams: output tokens/s", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=90)


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        grouped.setdefault(run["contender"], []).append(run)
    for name, group in grouped.items():
        # Disturbed runs count only if there are no others.
        grouped[name] = [run for run in group if not run["disturbed"]] or group
    speeds = {name: median(group, "output_tokens_per_s") for name, group in grouped.items()}
    ours = [name for name in grouped if name.startswith("penstock")]
    head = ["server", "runs", "output tokens/s", "TTFT ms mean", "p50", "p99",
            "inter-token ms p50", "p99", "per token ms",
            "tokens/server CPU s", "us a token beside vLLM's core", "memory MB", "ready s",
            "other CPU s",
            *(f"{name} / this" for name in ours)]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, group in grouped.items():
        ratios = [f"{speeds[our] / speeds[name]:.2f}" for our in ours]
        lines.append("| " + " | ".join([*row(name, group), *ratios]) + " |")
    return lines


def row(name: str, group: Sequence[dict[str, Any]]) -> list[str]:
    speeds = [run["bench"]["output_tokens_per_s"] for run in group]
    mark = " (disturbed)" if any(run["disturbed"] for run in group) else ""
    latencies = [
        f"{median(group, key, part):.{digits}f}"
        for key, part, digits in (
            ("ttft_ms", "mean", 0),
            ("ttft_ms", "p50", 0),
            ("ttft_ms", "p99", 0),
            ("inter_token_ms", "p50", 1),
            ("inter_token_ms", "p99", 1),
            ("tpot_ms", "mean", 1),
        )
    ]
    costs = [
        f"{statistics.median(run[key] for run in group):.{digits}f}"
        for key, digits in (
            ("tokens_per_server_cpu_s", 1),
            ("beside_us", 0),
            ("pss_mb", 0),
            ("ready_s", 1),
            ("other_cpu_s", 1),
        )
    ]
    spread = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"
    return [f"{name}{mark}", str(len(group)), spread, *latencies, *costs]


def median(group: Sequence[dict[str, Any]], key: str, part: str = "") -> float:
    values: list[float] = [run["bench"][key][part] if part else run["bench"][key] for run in group]
    return statistics.median(values)


def machine(bench: Bench) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                cpu = value.strip()
            if key.strip() == "flags":
                flags.update(value.split())
    wanted = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    return {
        "cpu": cpu,
        "features": [flag for flag in wanted if flag in flags],
        "cores": list(bench.cores),
        "threads": bench.threads,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
