"""Measures costs and limits of the router, with fake-runner shards on this machine.

    python benchmarks/router.py tokens
    python benchmarks/router.py latency --seconds 30 --rounds 5 --json latency.json
    python benchmarks/router.py long --plot long.png

Every sub-command starts a shard and a router, loads them from another process, prints a table of
medians over its rounds, and ends all processes. Cases take turns in each round. The table has the
cores that each part and unrelated processes used: on a machine that others use, figures are rough.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.router_bench import attack, costly, figures, steady, tokenizing, traffic
from benchmarks.router_bench.figures import Row
from benchmarks.router_bench.scenario import Scenario, positive
from penstock_cli.arguments import positive_int
from penstock_common.version import how_to_install

# Scenarios with the step time of a fake runner, if any, the seconds of a window, and rounds.
_SCENARIOS: dict[str, tuple[Scenario, float | None, float, int]] = {
    "tokens": (steady.TOKENS, 20.0, 10.0, 3),
    "latency": (steady.LATENCY, 20.0, 10.0, 3),
    "streams": (steady.STREAMS, 250.0, 10.0, 1),
    "requests": (traffic.REQUESTS, 1.0, 10.0, 1),
    "long": (traffic.LONG, 20.0, 20.0, 1),
    "ttft": (traffic.TTFT, 20.0, 10.0, 3),
    "tokenizing": (tokenizing.TOKENIZING, 10.0, 20.0, 3),
    "overload": (traffic.OVERLOAD, 20.0, 20.0, 1),
    "attack": (attack.ATTACK, 20.0, 60.0, 1),
    "costly": (costly.COSTLY, None, 60.0, 1),
    "workers": (steady.WORKERS, 20.0, 10.0, 3),
}


def main() -> int:
    args = parse_args(sys.argv[1:])
    # Like Ctrl-C, so that no process is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    scenario: Scenario = args.scenario
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row in scenario.measure(args, Path(folder)):
                rows.append(row)
                place = f"{row['round'] + 1} of {args.rounds}"
                print(f"{row['case']} ({place})", file=sys.stderr, flush=True)
        except (AssertionError, RuntimeError) as error:
            # A server did not start, or a load is silent.
            print(f"{args.name}: {error}", file=sys.stderr)
            return 1
    medians = figures.medians(rows)
    remarks = scenario.remarks(medians, args)
    print(figures.table(medians, scenario.columns))
    print(*remarks, sep="\n")
    if args.json:
        report = {"command": sys.argv[1:], "machine": _machine(), "remarks": remarks,
                  "medians": medians, "rows": rows}  # fmt: skip
        args.json.write_text(json.dumps(_plain(report), indent=1) + "\n")
    if args.plot:
        figure, axes = figures.subplots(scenario.num_axes, f"{args.name}: {scenario.help}")
        scenario.draw(medians, rows, axes)
        figures.save(figure, args.plot)
    return 0


def parse_args(arguments: Sequence[str]) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=kind)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (scenario, step_ms, seconds, rounds) in _SCENARIOS.items():
        command = commands.add_parser(
            name, help=scenario.help, description=scenario.description, formatter_class=kind
        )
        scenario.add_arguments(command)
        _add_common(command, step_ms, seconds, rounds)
        command.set_defaults(scenario=scenario, name=name)
    args = parser.parse_args(arguments)
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error(f"--plot: needs matplotlib; {how_to_install('bench')}")
    return args


def _add_common(
    parser: argparse.ArgumentParser, step_ms: float | None, seconds: float, rounds: int
) -> None:
    add = parser.add_argument
    if step_ms is not None:
        add("--step-ms", type=positive, default=step_ms, metavar="MS",
            help="of the fake runner (default: %(default)g)")  # fmt: skip
    add("--seconds", type=positive, default=seconds, metavar="S",
        help="of each measured window (default: %(default)g)")  # fmt: skip
    add("--rounds", type=positive_int, default=rounds, metavar="N",
        help="of all cases (default: %(default)s)")  # fmt: skip
    add("--pin", action="store_true", help="the router on the first core, all else on the others")
    add("--shard-flags", type=shlex.split, default=[], metavar="FLAGS",
        help="further ones, as in '--max-num-seqs 512'")  # fmt: skip
    add("--router-flags", type=shlex.split, default=[], metavar="FLAGS",
        help="further ones, as in '--tokenizer-threads 1'")  # fmt: skip
    add("--json", type=_new_file, metavar="FILE", help="every window, and the medians, as JSON")
    add("--plot", type=_new_file, metavar="FILE", help="draw them, as PNG")


def _new_file(text: str) -> Path:
    """Check the path before anything runs."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, not {text!r}")
    return path


def _machine() -> dict[str, object]:
    return {
        "cores": psutil.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "load_average": psutil.getloadavg(),
    }


def _plain(value: object) -> object:
    """Make a value fit JSON, without infinity and NaN."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
