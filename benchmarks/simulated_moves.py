"""Costs of moving streams between GPUs, on simulated devices and links and a virtual clock.

    python benchmarks/simulated_moves.py
    python benchmarks/simulated_moves.py pauses --plot docs/images

Client library, servers, engines and KV block managers are real, with the fake runner and a network
in memory. Time is simulated: a step, a copy between device and host, and a transfer between hosts
take the time of Llama-3.1-8B's bytes and multiplications on an H100
(`tests/simulation/devices.py`). Every token is checked. Figures are the same on any machine.

`pauses`: the pause of a stream of 1,000 to 32,000 tokens that moves. `drain`: 32 streams of 8,000
tokens leave one shard of four. `roles`: prompts of 4,000 tokens beside 64 streams, on one shard of
the role "prefill" and three "decode", or on four without roles. `shared`: a hundred requests a
second to eight shards, with prompts that begin with the same 4,000 tokens. `joins`: requests queue
at one shard when another joins.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulation.device_loads import (
    Drain,
    Fared,
    Load,
    Setting,
    Shared,
    drain,
    first_token_elsewhere,
    first_tokens_when_one_joins,
    long_prompts,
    pause_of_move,
    shared_prompt,
)

from benchmarks.tables import row, table
from penstock_common.version import how_to_install

_LENGTHS = (1000, 2000, 4000, 8000, 16_000, 32_000)
_NONE = Setting(blocks="none")
_PAUSES: dict[str, tuple[Callable[[Setting, int], float], Setting]] = {
    "computed again": (pause_of_move, _NONE),
    "fetched, 25 Gbit/s": (first_token_elsewhere, Setting(25)),
    "fetched, 100 Gbit/s": (first_token_elsewhere, Setting(100)),
    "fetched ahead, 25 Gbit/s": (pause_of_move, Setting(25)),
    "fetched ahead, 100 Gbit/s": (pause_of_move, Setting(100)),
}
_DRAINS = {
    "fetched ahead, 100 Gbit/s": Setting(100),
    "fetched ahead, 25 Gbit/s": Setting(25),
    "computed again": _NONE,
}
_SPLIT = ("prefill", "decode", "decode", "decode")
_ALIKE = ("both",) * 4
_4K_2, _4K_4, _4K_8 = Load(2), Load(4), Load(8)
_SHORT = Load(24, prompt_tokens=500)
# The load, the links, and the shards.
_ROLES: Sequence[tuple[str, Load, Setting, dict[str, Sequence[str]]]] = (
    ("no prompts", Load(0), Setting(), {"roles": _SPLIT, "all alike": _ALIKE}),
    ("2 a second of 4,000 tokens", _4K_2, Setting(), {"roles": _SPLIT, "all alike": _ALIKE}),
    ("4 a second of 4,000 tokens", _4K_4, Setting(), {"roles": _SPLIT, "all alike": _ALIKE}),
    ("the same, 10 Gbit/s", _4K_4, Setting(10), {"roles": _SPLIT}),
    ("8 a second of 4,000 tokens", _4K_8, Setting(), {"roles": _SPLIT, "all alike": _ALIKE}),
    ("24 a second of 500 tokens", _SHORT, Setting(), {"roles": _SPLIT, "all alike": _ALIKE}),
    ("2 a second of 4,000, two shards", _4K_2, Setting(), {"roles": _SPLIT[:2],
                                                         "all alike": _ALIKE[:2]}),
)  # fmt: skip

_QUEUES = ((128, 4000), (400, 1000))

_SHARED = {
    "least-load": Setting(blocks="none"),
    "prefix-affinity": Setting(blocks="none", policy="prefix-affinity"),
    "prefix-affinity, peers at 100 Gbit/s": Setting(100, policy="prefix-affinity"),
    "prefix-affinity, peers at 25 Gbit/s": Setting(25, policy="prefix-affinity"),
}

_ROLES_TITLES = ("between tokens of the 64, p99, ms", "first token, p50, ms")


def main() -> None:
    args = parse_args()
    logging.disable()
    gc.disable()
    for name in args.parts:
        _PARTS[name](args.plot)
        gc.collect()


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", default=[*_PARTS],
                        help=f"of {', '.join(_PARTS)} (default: all)")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write moves-*.png there")
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in _PARTS:
            parser.error(f"{part!r} is none of {', '.join(_PARTS)}")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error(f"--plot: needs matplotlib; {how_to_install('bench')}")
    return args


# ---- parts --------------------------------------------------------------------------------------


def pauses(plots: Path | None) -> None:
    """Print a table of milliseconds; draw a curve for each column."""
    curves: dict[str, list[float]] = {name: [] for name in _PAUSES}
    table("tokens", *_PAUSES)
    for num_tokens in _LENGTHS:
        for name, (measure, setting) in _PAUSES.items():
            curves[name].append(1e3 * measure(setting, num_tokens))
            gc.collect()
        row(f"{num_tokens:,}", *(f"{curve[-1]:,.0f}" for curve in curves.values()))
    if plots is None:
        return
    figure, axes = new_figure(1, "A stream goes on at another shard (Llama-3.1-8B, H100)")
    for name, curve in curves.items():
        # Two curves are equal.
        style = "--" if name.startswith("fetched ahead, 100") else "-"
        axes[0].plot(_LENGTHS, curve, style, marker="o", label=name)
    axes[0].set(xscale="log", yscale="log", xlabel="tokens", ylabel="pause, ms")
    axes[0].set_xticks(_LENGTHS, [f"{length // 1000}k" for length in _LENGTHS])
    axes[0].minorticks_off()
    axes[0].legend()
    figure.savefig(plots / "moves-pauses.png", dpi=120)


def drains(plots: Path | None) -> None:
    """Print and draw each stream's longest pause, in ms and in usual steps before."""
    found: dict[str, Drain] = {}
    table("blocks", "pause p50, ms", "max", "in steps p50", "max", "drained in, s",
          "others: usual step, ms", "longest")  # fmt: skip
    for name, setting in _DRAINS.items():
        seen = found[name] = drain(setting, num_streams=32, num_tokens=8000, num_others=8)
        row(
            name,
            f"{1e3 * median(seen.longest_s):,.0f}",
            f"{1e3 * max(seen.longest_s):,.0f}",
            f"{median(seen.steps):.1f}",
            f"{max(seen.steps):.1f}",
            f"{seen.took_s:.1f}",
            f"{1e3 * seen.others_usual_s:.1f}",
            f"{1e3 * seen.others_longest_s:.1f}",
        )
        gc.collect()
    if plots is None:
        return
    figure, axes = new_figure(1, "32 streams of 8,000 tokens leave a shard")
    for name, seen in found.items():
        axes[0].plot(range(1, len(seen.steps) + 1), seen.steps, marker=".", label=name)
    axes[0].axhline(3, color="grey", linestyle="--", linewidth=1)
    axes[0].set(yscale="log", xlabel="streams, by their pause", ylabel="longest pause, steps")
    axes[0].legend()
    figure.savefig(plots / "moves-drain.png", dpi=120)


def roles(plots: Path | None) -> None:
    found: dict[str, dict[str, Fared]] = {}
    table("prompts that come", "shards", "between tokens p99", "first token p50", "max",
          "longest pause of an answer p50")  # fmt: skip
    for what, load, setting, fleets in _ROLES:
        found[what] = {}
        for name, fleet in fleets.items():
            fared = found[what][name] = long_prompts(setting, fleet, load)
            row(what, name, f"{1e3 * fared.gap_p99_s:.1f}", *_answers_ms(fared))
            gc.collect()
    if plots is None:
        return
    figure, axes = new_figure(2, "Prompts of 4,000 tokens beside 64 streams, 4 shards")
    shown = [what for what, load, _, fleets in _ROLES if len(fleets) == 2][:4]
    for offset, name in enumerate(("roles", "all alike")):
        places = [index + 0.4 * offset for index in range(len(shown))]
        gaps = [1e3 * found[what][name].gap_p99_s for what in shown]
        firsts = [1e3 * median(found[what][name].first_tokens_s or [0.0]) for what in shown]
        axes[0].bar(places, gaps, 0.4, label=name)
        axes[1].bar(places[1:], firsts[1:], 0.4, label=name)
    for axis, title in zip(axes, _ROLES_TITLES, strict=True):
        axis.set_title(title)
        axis.set_xticks(
            [0.2 + i for i in range(len(shown))], [what.split(" of")[0] for what in shown]
        )
        axis.legend()
    axes[1].set_xlim(axes[0].get_xlim())
    figure.savefig(plots / "moves-roles.png", dpi=120)


def shared(plots: Path | None) -> None:
    """Print how often shared prefixes were computed, and milliseconds to first tokens; no plot."""
    table("policy", "shards that got any", "times computed", "first token p50", "p99", "max")
    for name, setting in _SHARED.items():
        fared = shared_prompt(setting, Shared())
        firsts = sorted(1e3 * each for each in fared.first_tokens_s)
        quantiles = (firsts[len(firsts) // 2], firsts[len(firsts) * 99 // 100], firsts[-1])
        row(
            name,
            str(fared.num_shards),
            f"{fared.times_computed:.1f}",
            *(f"{each:,.0f}" for each in quantiles),
        )
        gc.collect()


def joins(plots: Path | None) -> None:
    """Print seconds to first tokens; no plot."""
    table("requests at once", "tokens each", "what waits", "first token p50", "p90", "max")
    for num_requests, num_tokens in _QUEUES:
        for name, rebalances in (("stays", False), ("goes where there is room", True)):
            firsts = sorted(
                first_tokens_when_one_joins(
                    num_requests=num_requests, num_tokens=num_tokens, rebalances=rebalances
                )
            )
            quantiles = (firsts[len(firsts) // 2], firsts[len(firsts) * 9 // 10], firsts[-1])
            row(
                str(num_requests),
                f"{num_tokens:,}",
                name,
                *(f"{each:.1f}" for each in quantiles),
            )
            gc.collect()


def _answers_ms(fared: Fared) -> list[str]:
    if not fared.first_tokens_s:
        return ["", "", ""]
    seconds = median(fared.first_tokens_s), max(fared.first_tokens_s), median(fared.longest_s)
    return [f"{1e3 * each:,.0f}" for each in seconds]


_PARTS: dict[str, Callable[[Path | None], None]] = {
    "pauses": pauses,
    "drain": drains,
    "roles": roles,
    "shared": shared,
    "joins": joins,
}


# ---- plots --------------------------------------------------------------------------------------


def new_figure(num_axes: int, title: str) -> tuple[Any, Sequence[Any]]:
    figure: Any = importlib.import_module("matplotlib.figure").Figure(
        figsize=(5.5 * num_axes + 1, 3.8), layout="constrained"
    )
    figure.suptitle(title)
    return figure, figure.subplots(1, num_axes, squeeze=False)[0]


if __name__ == "__main__":
    main()
