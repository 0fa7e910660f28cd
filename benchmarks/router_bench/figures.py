"""Rows of figures: percentiles, medians over rounds, a table, and plots.

A row has names and numbers of a measured window, with its `case`.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_MIN_BARS = 4


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all do not exceed; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def curve(values: Sequence[float], points: int = 200) -> list[float]:
    """Return evenly spread values of a distribution, with the smallest and largest."""
    if not values:
        return []
    ordered = sorted(values)
    return [ordered[round(i * (len(ordered) - 1) / (points - 1))] for i in range(points)]


def cases(rows: Sequence[Row]) -> list[str]:
    """Return the names of cases, in the order of their first rows."""
    return list(dict.fromkeys(row["case"] for row in rows))


def medians(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each case, with medians of numbers over rounds, and first values of all
    else.
    """
    result = []
    for case in cases(rows):
        rounds = [row for row in rows if row["case"] == case]
        median: Row = {"case": case, "rounds": len(rounds)}
        for key, first in rounds[0].items():
            values = [row[key] for row in rounds if row.get(key) is not None]
            is_number = isinstance(first, int | float) and not isinstance(first, bool)
            median[key] = statistics.median(values) if is_number and values else first
        result.append(median)
    return result


def of_case(rows: Sequence[Row], case: str) -> Row:
    return next(row for row in rows if row["case"] == case)


def table(rows: Sequence[Row], columns: Sequence[tuple[str, str, str]]) -> str:
    """Return rows as text. Columns are key, heading and format; a dash stands for a missing
    value.
    """
    cells = [[heading for _, heading, _ in columns]]
    for row in rows:
        values = ((row.get(key), style) for key, _, style in columns)
        cells.append(["-" if value is None else format(value, style) for value, style in values])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = []
    for line in cells:
        first, *others = line
        padded = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *padded]))
    return "\n".join(lines)


def subplots(count: int, title: str) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, side by side."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(4.2 * count, 3.6), layout="constrained"
    )
    figure.suptitle(title)
    axes = figure.subplots(1, count, squeeze=False)[0]
    for each in axes:
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
    return figure, list(axes)


def bars(axes: Any, rows: Sequence[Row], key: str, title: str) -> None:
    """Draw a bar for each case, with its value."""
    shown = [row for row in rows if row.get(key) is not None]
    drawn = axes.barh([row["case"] for row in shown], [row[key] for row in shown], color="C0")
    axes.bar_label(drawn, fmt="%.4g", padding=3)
    axes.margins(x=0.25)
    # Bars as thick as in figures with more of them.
    axes.set_ylim(max(len(shown), _MIN_BARS) - 0.5, -0.5)
    axes.set_title(title)


def distributions(axes: Any, curves: dict[str, Sequence[float]], label: str) -> None:
    """Draw distributions as curves: the share of values at or below."""
    for name, values in curves.items():
        shares = [100 * i / max(len(values) - 1, 1) for i in range(len(values))]
        axes.plot(values, shares, label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("% at or below")
    if curves:
        axes.legend()


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, format="png", dpi=90)
