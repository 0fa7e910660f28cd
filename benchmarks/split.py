"""Compares router and engine in two processes with the same code in one process.

    python benchmarks/split.py
    python benchmarks/split.py --models fake --streams 256 --step-ms 5 --plot split.png
    python benchmarks/split.py --models 3m 130m --seconds 30 --rounds 5 --json split.json

In each round, each way starts anew, in turns, with the same flags and cores. First, a few requests
check that both give the same tokens. Then both get the same completions of ShareGPT-like lengths:
at saturation (a number of streams, each with one request after another) and at a fixed rate (at
random times, whatever the answers). Prints medians over rounds.

ways
  one process   the engine's loop is a thread beside the router's event loop, as in servers with one
                interpreter; a callback for each step replaces gRPC and a socket
  pair          as `penstock serve` starts them: a router, a shard's server, its engine
  tokens only   the engine's thread and a reader of ids, without a router and text (only at
                saturation)

models
  fake          no model: a step takes --step-ms, as on a GPU, and the engine works beside it
  3m            the built-in model
  130m          random weights in the shape of a small Llama; see --model-dir

parts of a step, from the end of one to the end of the next, while there are requests
  model         the device's time: --step-ms of the fake runner. For others, CPU time of the
                engine's thread in the runner, with sampling (with --threads above 1, time by the
                clock without waits for a core)
  engine        CPU time of the engine's thread outside the runner; with the fake runner, only as
                far as it does not fit beside the step
  wait          the rest: another thread held the interpreter's lock, or no core was free ('core',
                including waits that a device hides); with the pair also the engine's socket

With a fake runner, the period minus --step-ms is the time that the device starves. Unlike a GPU,
the fake runner makes its tokens, which are hashes, in Python and needs the interpreter's lock.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import peer_models
from benchmarks.router_bench import figures
from benchmarks.router_bench.figures import Row
from benchmarks.router_bench.http_load import MODEL
from benchmarks.router_bench.scenario import positive, ratio
from benchmarks.router_bench.servers import Load
from benchmarks.split_bench import chart, load
from benchmarks.split_bench.steps import parts_of, read_moments
from benchmarks.split_bench.ways import ONE, PAIR, TOKENS_ONLY, WAYS, Meter, Stack, serving
from penstock_cli.arguments import positive_int
from penstock_common.version import how_to_install

SATURATION, FIXED_RATE = "saturation", "fixed rate"
# Default numbers of streams for each model.
_STREAMS = {"fake": (64, 256), "3m": (64,), "130m": (16,)}
# The fixed rate, as a share of the slower way's rate at saturation.
_RATE_SHARE = 0.5
# Beyond the window, because its requests may wait for first tokens.
_RESULT_TIMEOUT_S = 60.0
_COLUMNS = (
    ("case", "case", ""),
    ("tokens_per_s", "tokens/s", ".0f"),
    ("rate", "requests/s", ".2f"),
    ("ttft_p50_ms", "TTFT p50 ms", ".1f"),
    ("ttft_p99_ms", "p99", ".1f"),
    ("gap_p50_ms", "ITL p50 ms", ".1f"),
    ("gap_p99_ms", "p99", ".1f"),
    ("rows", "batch", ".0f"),
    ("period_ms", "step ms", ".2f"),
    ("device_ms", "model", ".2f"),
    ("engine_ms", "engine", ".2f"),
    ("wait_ms", "wait", ".2f"),
    ("core_wait_ms", "core", ".2f"),
    ("router_cores", "cores: router", ".2f"),
    ("server_cores", "server", ".2f"),
    ("engine_cores", "engine", ".2f"),
    ("load_cores", "load", ".2f"),
    ("others_cores", "others", ".2f"),
)


@dataclass(frozen=True, slots=True)
class Group:
    """A model and a number of streams, for which ways are compared."""

    model: str
    streams: int
    flags: tuple[str, ...]
    # A step of a device that works beside the engine; None if the engine's thread computes.
    step_s: float | None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.streams} streams"


def main() -> int:
    args = parse_args(sys.argv[1:])
    # Like Ctrl-C, so that no process is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row in _measure(args, Path(folder)):
                rows.append(row)
                place = f"{row['round'] + 1} of {args.rounds}"
                print(f"{row['case']} ({place})", file=sys.stderr, flush=True)
        except (AssertionError, OSError, RuntimeError) as error:
            # A server did not start, tokens differ, or a load is silent.
            print(f"split: {error}", file=sys.stderr)
            return 1
    medians = figures.medians(rows)
    remarks = _remarks(medians)
    print(figures.table(medians, _COLUMNS))
    print(*remarks, sep="\n")
    if args.json:
        report = {"command": sys.argv[1:], "machine": _machine(), "remarks": remarks,
                  "medians": medians, "rows": rows}  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        chart.draw(medians, rows, args.plot)
    return 0


def parse_args(arguments: Sequence[str]) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=kind)
    _add_cases(parser)
    _add_measuring(parser)
    args = parser.parse_args(arguments)
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error(f"--plot: needs matplotlib; {how_to_install('bench')}")
    return args


def _add_cases(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    usual = "; ".join(f"{model} {' '.join(map(str, n))}" for model, n in _STREAMS.items())
    add("--models", nargs="+", choices=tuple(_STREAMS), default=list(_STREAMS), metavar="MODEL",
        help=f"of {', '.join(_STREAMS)} (default: all)")  # fmt: skip
    add("--streams", nargs="+", type=positive_int, metavar="N",
        help=f"at saturation (default: {usual})")  # fmt: skip
    add("--rate", type=positive, metavar="R",
        help=f"requests a second at the fixed rate (default: {_RATE_SHARE:g} of what the slower "
        "way answers at saturation, in the first round)")  # fmt: skip
    add("--loads", nargs="+", choices=(SATURATION, FIXED_RATE), default=[SATURATION, FIXED_RATE],
        metavar="LOAD", help=f"'{SATURATION}', '{FIXED_RATE}' (default: both)")  # fmt: skip
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY",
        help=", ".join(f"'{way}'" for way in WAYS) + " (default: all)")  # fmt: skip
    add("--step-ms", type=positive, default=10.0, metavar="MS",
        help="of the fake runner (default: %(default)g)")  # fmt: skip
    add("--threads", type=positive_int, default=1, metavar="N",
        help="that compute a model, in either way (default: %(default)s)")  # fmt: skip
    add("--model-dir", type=Path, metavar="DIR",
        help="keep the 130m model here, to be used again (default: made anew, 20 s)")  # fmt: skip


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seconds", type=positive, default=20.0, metavar="S",
        help="of each measured window (default: %(default)g)")  # fmt: skip
    add("--warmup", type=positive, default=5.0, metavar="S",
        help="of load before each window (default: %(default)g)")  # fmt: skip
    add("--rounds", type=positive_int, default=3, metavar="N",
        help="of all cases (default: %(default)s)")  # fmt: skip
    add("--json", type=_new_file, metavar="FILE", help="every window, and the medians, as JSON")
    add("--plot", type=_new_file, metavar="FILE", help="draw them, as PNG")


def _new_file(text: str) -> Path:
    """Check the path before anything runs."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, not {text!r}")
    return path


# ---- measuring ----------------------------------------------------------------------------------


def _measure(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    groups = [
        _group(model, streams, args, folder)
        for model in args.models
        for streams in args.streams or _STREAMS[model]
    ]
    comparisons = [_Comparison(group, args, folder) for group in groups]
    for number in range(args.rounds):
        for comparison in comparisons:
            yield from comparison.round(number)


def _group(model: str, streams: int, args: argparse.Namespace, folder: Path) -> Group:
    flags = ["--served-model-name", MODEL, "--max-num-seqs", str(streams), "--device", "cpu"]
    flags += ["--threads", str(args.threads)]
    step_s = None
    if model == "fake":
        flags += ["--runner", "fake", "--step-ms", str(args.step_ms)]
        step_s = args.step_ms / 1e3
    if model == "130m":
        directory = (args.model_dir or folder) / model
        if not (directory / "tokenizer.json").exists():
            print(f"making {directory}", file=sys.stderr, flush=True)
            peer_models.make(directory, *peer_models.MODELS[model])
        flags += ["--model", str(directory)]
    return Group(model, streams, tuple(flags), step_s)


class _Comparison:
    """Runs all ways on a group."""

    def __init__(self, group: Group, args: argparse.Namespace, folder: Path) -> None:
        self._group = group
        self._args = args
        self._folder = folder
        self._rate: float | None = args.rate
        # The first way's answers to probes.
        self._texts: list[str] | None = None

    def round(self, number: int) -> Iterator[Row]:
        """Run each way with each load; the order of ways alternates."""
        ways = self._args.ways if number % 2 == 0 else self._args.ways[::-1]
        for kind in (SATURATION, FIXED_RATE):
            slowest = float("inf")
            for way in ways if kind in self._args.loads or self._rate is None else ():
                if way == TOKENS_ONLY and kind != SATURATION:
                    continue
                row = self._run(way, kind, number)
                if way != TOKENS_ONLY:
                    slowest = min(slowest, row["tokens_per_s"])
                if kind in self._args.loads:
                    yield row
            if self._rate is None and kind == SATURATION:
                self._rate = _RATE_SHARE * slowest / load.mean_output_tokens()

    def _run(self, way: str, kind: str, number: int) -> Row:
        group = self._group
        streams = group.streams
        with serving(way, self._folder, group.flags, streams=streams, seed=number) as stack:
            if way == TOKENS_ONLY:
                found = self._watch(stack)
            else:
                self._compare_tokens(stack, way)
                found = self._load(stack, kind, number)
        row = {"case": f"{group.name}, {kind}: {way}", "round": number, "group": group.name,
               "way": way, "load": kind}  # fmt: skip
        return {**row, "rate": self._rate if kind == FIXED_RATE else None, **found}

    def _compare_tokens(self, stack: Stack, way: str) -> None:
        """Raises RuntimeError if tokens differ from other ways'."""
        texts = load.probe_texts(stack.port)
        if self._texts is None:
            self._texts = texts
        if texts != self._texts:
            raise RuntimeError(f"{self._group.name}: {way} gave other tokens for the same seeds")

    def _load(self, stack: Stack, kind: str, number: int) -> Row:
        rate = 0.0
        if kind == FIXED_RATE:
            assert self._rate is not None
            rate = self._rate
        traffic = load.Traffic(self._group.streams, rate, self._args.warmup, seed=number)
        with Load(load.send, stack.port, traffic) as sender:
            sender.wait_ready()
            meter = Meter(stack, load=sender.process)
            time.sleep(self._args.seconds)
            from_s, to_s, cores = meter.read()
            sender.stop(from_s, to_s)
            found: Row = sender.result(_RESULT_TIMEOUT_S)
        if found["failed"]:
            raise RuntimeError(f"{self._group.name}: {found['failed']} requests failed")
        return {**found, **self._steps(stack, from_s, to_s, cores)}

    def _watch(self, stack: Stack) -> Row:
        time.sleep(self._args.warmup)
        meter = Meter(stack)
        time.sleep(self._args.seconds)
        return self._steps(stack, *meter.read())

    def _steps(self, stack: Stack, from_s: float, to_s: float, cores: dict[str, float]) -> Row:
        moments = list(read_moments(stack.steps_file))
        step_s, threads = self._group.step_s, self._args.threads
        parts = parts_of(moments, from_s, to_s, step_s=step_s, threads=threads)
        found = {name: value for name, value in asdict(parts).items() if not name.endswith("_s")}
        for name in ("period", "device", "engine", "wait", "core_wait", "engine_cpu"):
            found[f"{name}_ms"] = 1e3 * getattr(parts, f"{name}_s")
        if "one" in cores:
            # All except the engine's thread, with a model's other compute threads.
            engine = parts.thread_cores
            cores = {"router": max(0.0, cores["one"] - engine), "engine": engine, **cores}
        found |= {f"{name}_cores": used for name, used in cores.items()}
        return {**found, "tokens_per_s": parts.tokens / (to_s - from_s)}


# ---- results ------------------------------------------------------------------------------------


def _remarks(medians: Sequence[Row]) -> list[str]:
    """Return lines that compare the pair with one process, and the waits of the fake device."""
    remarks = []
    pairs = {(row["group"], row["load"]): row for row in medians if row["way"] == PAIR}
    for row in medians:
        pair = pairs.get((row["group"], row["load"]))
        if row["way"] != ONE or pair is None:
            continue
        shown = ", ".join(
            f"{label} {ratio(pair[key] or 0.0, row[key] or 0.0):.2f}"
            for label, key in (
                ("tokens/s", "tokens_per_s"),
                ("TTFT p50", "ttft_p50_ms"),
                ("p99", "ttft_p99_ms"),
                ("ITL p50", "gap_p50_ms"),
                ("p99", "gap_p99_ms"),
                ("step", "period_ms"),
            )
        )
        remarks.append(f"{row['group']}, {row['load']}, pair / one process: {shown}")
    for row in medians:
        if row["group"].startswith("fake"):
            times = ratio(row["period_ms"], row["device_ms"])
            remarks.append(f"{row['case']}: the device's steps take {times:.3f} of their time")
    others = statistics.median(row["others_cores"] for row in medians)
    remarks.append(f"other processes used {others:.2f} of {psutil.cpu_count()} cores")
    return remarks


def _machine() -> dict[str, Any]:
    return {
        "cores": psutil.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "load_average": psutil.getloadavg(),
    }


if __name__ == "__main__":
    sys.exit(main())
