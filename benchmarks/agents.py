"""Compares policies by the share of agents' prompts that a fleet finds cached.

    python benchmarks/agents.py
    python benchmarks/agents.py --loads 80 --rules least-load prefix-affinity --kv-tokens 640000
    python benchmarks/agents.py --real

Sessions begin at random. Each has dozens of turns on one growing prompt. They share system prompts
with tools, pause while a tool runs, and some start subagents. See `--help` for all settings.

As in `fleet.py`, a shard's own engine, scheduler and KV block manager run over a simulated device,
and the client package's policies choose shards. Time is virtual: the same seed gives the same
figures on any machine. A load of 100 % is the rate of sessions that keeps all shards busy if each
finds cached what any has computed. `one-shard` is a reference, no policy: it sends all requests of
a session to one shard, the one that had the fewest sessions.

`--real` runs a router and shards with the fake runner as processes in real time instead, with small
sessions and short pauses.

Columns: requests in the measured time; those that ended in it; the share of prompt tokens that was
found cached, also in % of the share in a cache without evictions; seconds to the first token and to
the first step (for a request that still waits at the end, until then); and the requests of the
busiest shard divided by the mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from benchmarks import tables
from benchmarks.agents_bench import real
from benchmarks.agents_bench.figures import HEADINGS, Figures, cells
from benchmarks.agents_bench.simulated import ONE_SHARD, Gpu, capacity, run
from benchmarks.agents_bench.trace import Habits, sessions
from penstock_cli.arguments import positive_int
from penstock_client.load_balancing.policies import POLICIES
from penstock_common.flags import number

_RULES = ("round-robin", "least-load", "prefix-affinity", "session", ONE_SHARD)
_POSITIVE = number(float, above=0)
# Help texts of the fields of `Habits`.
_OF_AGENTS = {
    "systems": "system prompts with tools that there are",
    "zipf": "the n-th is chosen in proportion to n to the power of -Z",
    "least_system_tokens": "of a system prompt and tools",
    "most_system_tokens": "of a system prompt and tools",
    "task_tokens": "of a task, median",
    "turns": "of a session, median",
    "answer_tokens": "of an answer, median",
    "result_tokens": "of a tool's result, median",
    "result_sigma": "spread of that: the deviation of its logarithm",
    "pause_s": "while a tool runs, median seconds",
    "pause_sigma": "spread of that",
    "branches": "probability that a turn starts subagents",
    "subagent_turns": "of a subagent, median",
    "most_tokens": "of a prompt and its answer",
}  # fmt: skip
_OF_SHARDS = {
    "step_s": "a step takes so long whatever it computes",
    "prompt_token_s": "and so much longer for each token of a prompt",
    "kv_tokens": "whose keys and values fit into a shard",
    "block_size": "tokens in a KV block",
    "max_num_seqs": "most requests in a step",
    "retained_share": "most of the blocks that are retained",
}
# With --real, flags of its shards set the other values.
_REAL_SHARDS = {"kv_tokens": 60_000}


def main() -> None:
    args = parse_args()
    tables.table(*HEADINGS)
    rows = []
    for load, rule, figures in measured(args):
        tables.row(*cells(load, rule, figures))
        rows.append({"load": load, "rule": rule, **figures.as_json()})
    if args.out:
        setting = {name: value for name, value in vars(args).items() if name != "out"}
        args.out.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=kind)
    add = parser.add_argument
    add("--rules", nargs="+", choices=(*POLICIES, ONE_SHARD), metavar="NAME",
        help=f"default: {' '.join(_RULES)}")  # fmt: skip
    add("--loads", nargs="+", type=_POSITIVE, metavar="PERCENT",
        help="default: 60 80 95; not with --real")  # fmt: skip
    add("--unnamed", action="store_true",
        help="requests do not say which session they are of; not with --real")  # fmt: skip
    add("--tool-pause-s", type=number(float, at_least=0), metavar="S",
        help="blocks of an answer that calls tools are retained for so long; not with --real "
        "(default: as the router's)")  # fmt: skip
    add("--others", type=number(float, at_least=0), default=0.0, metavar="R",
        help="requests a second beside the agents', of 4,000 tokens that share nothing; not with "
        "--real")  # fmt: skip
    add("--real", action="store_true", help="processes, in the time of this machine")
    add("--rate", type=_POSITIVE, metavar="R",
        help="sessions that begin each second, only with --real (default: 1)")  # fmt: skip
    add("--shards", type=positive_int, metavar="N", help="default: 8, with --real 3")
    add("--warm-up", type=_POSITIVE, metavar="S",
        help="before the measured time (default: 30, with --real 10)")  # fmt: skip
    add("--seconds", type=_POSITIVE, metavar="S",
        help="that are measured (default: 90, with --real 30)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--out", type=Path, metavar="FILE", help="write the figures there, as JSON")
    agents, shards = (parser.add_argument_group(name) for name in ("agents", "shards"))
    for name, text in _OF_AGENTS.items():
        _add_field(agents, name, text, getattr(Habits(), name), getattr(real.SMALL, name))
    for name, text in _OF_SHARDS.items():
        _add_field(shards, name, text, getattr(Gpu(), name), _REAL_SHARDS.get(name))
    args = parser.parse_args(argv)
    return _completed(parser, args)


def _add_field(group: Any, name: str, text: str, default: float, small: float | None) -> None:
    kind = positive_int if isinstance(default, int) else number(float, at_least=0)
    otherwise = "not with --real" if small is None else f"with --real {small:g}"
    group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N",
                       help=f"{text} (default: {default:g}, {otherwise})")  # fmt: skip


def _completed(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Set the defaults that depend on the mode."""
    simulated = {"rules": list(_RULES), "loads": [60.0, 80.0, 95.0], "shards": 8, "warm_up": 30.0,
                 "seconds": 90.0, **{name: getattr(Gpu(), name) for name in _OF_SHARDS},
                 **dataclasses.asdict(Habits())}  # fmt: skip
    processes = {"rules": [rule for rule in _RULES if rule != ONE_SHARD], "rate": 1.0, "shards": 3,
                 "warm_up": 10.0, "seconds": 30.0, **_REAL_SHARDS,
                 **dataclasses.asdict(real.SMALL)}  # fmt: skip
    usual, others = (processes, simulated) if args.real else (simulated, processes)
    for name in others.keys() - usual.keys():
        if getattr(args, name) is not None:
            mode = "with" if args.real else "without"
            parser.error(f"--{name.replace('_', '-')}: has no meaning {mode} --real")
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("unnamed", "tool_pause_s", "others"):
        if args.real and getattr(args, name) not in (None, False, 0.0):
            parser.error(f"--{name.replace('_', '-')}: has no meaning with --real")
    if args.real and ONE_SHARD in args.rules:
        parser.error(f"--rules {ONE_SHARD}: no router has it")
    if args.least_system_tokens > args.most_system_tokens:
        parser.error("--least-system-tokens: more than --most-system-tokens")
    return args


def measured(args: argparse.Namespace) -> Iterator[tuple[str, str, Figures]]:
    """Measure each load and rule."""
    habits = Habits(**{name: getattr(args, name) for name in _OF_AGENTS})
    return _real(args, habits) if args.real else _simulated(args, habits)


def _simulated(args: argparse.Namespace, habits: Habits) -> Iterator[tuple[str, str, Figures]]:
    gpu = Gpu(**{name: getattr(args, name) for name in _OF_SHARDS})
    most_per_s = capacity(habits, gpu, args.shards, args.seed)
    print(f"capacity of {args.shards} shards: {most_per_s:.3f} sessions/s", file=sys.stderr)
    to_s = args.warm_up + args.seconds
    for percent in args.loads:
        per_s = most_per_s * percent / 100
        trace = sessions(habits, per_s=per_s, seconds=to_s, seed=args.seed)
        for rule in args.rules:
            began_s = time.monotonic()
            figures = run(
                rule,
                trace,
                gpu,
                args.shards,
                from_s=args.warm_up,
                to_s=to_s,
                unnamed=args.unnamed,
                tool_pause_s=args.tool_pause_s,
                others_per_s=args.others,
            )
            print(f"{rule}: {time.monotonic() - began_s:.1f} s", file=sys.stderr)
            yield f"{percent:g} %", rule, figures


def _real(args: argparse.Namespace, habits: Habits) -> Iterator[tuple[str, str, Figures]]:
    to_s = args.warm_up + args.seconds
    trace = sessions(habits, per_s=args.rate, seconds=to_s, seed=args.seed)
    # Sessions in progress at the start would find nothing cached.
    trace = [session for session in trace if not session.said]
    for rule in args.rules:
        figures = real.run(rule, trace, args.shards, args.kv_tokens, from_s=args.warm_up, to_s=to_s)
        yield f"{args.rate:g}/s", rule, figures


if __name__ == "__main__":
    main()
