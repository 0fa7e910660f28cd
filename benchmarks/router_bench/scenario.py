"""Sub-commands of `router.py`, and their common parts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.router_bench.figures import Row
from benchmarks.router_bench.http_load import MODEL
from penstock_common.flags import number

Columns = Sequence[tuple[str, str, str]]

# Columns of every case: CPU time of each part and of other processes, in cores.
LOAD_COLUMNS = (
    ("router_cores", "router", ".2f"),
    ("shard_cores", "shard", ".2f"),
    ("engine_cores", "engine", ".2f"),
    ("load_cores", "load", ".2f"),
    ("others_cores", "others", ".2f"),
)
positive = number(float, above=0)
# So many that no measured stream ends.
ENDLESS_TOKENS = 60_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """`measure` yields a row for each window; others get rows of medians, and all rows."""

    help: str
    description: str
    columns: Columns
    add_arguments: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Path], Iterator[Row]]
    # Lines below the table.
    remarks: Callable[[list[Row], argparse.Namespace], list[str]]
    draw: Callable[[list[Row], list[Row], list[Any]], None]
    # Axes for `draw`.
    num_axes: int


def shard_flags(args: argparse.Namespace, *flags: object) -> list[str]:
    """Return flags of the sub-command, then those of the command line, which replace them."""
    usual = ("--served-model-name", MODEL, "--step-ms", args.step_ms)
    return [*map(str, usual), *map(str, flags), *args.shard_flags]


def router_flags(args: argparse.Namespace, *flags: object) -> list[str]:
    """Return flags of the sub-command, then those of the command line, which replace them."""
    return [*map(str, flags), *args.router_flags]


def ratio(numerator: float, denominator: float) -> float:
    """Return the ratio; NaN if the denominator is 0."""
    return numerator / denominator if denominator else float("nan")
