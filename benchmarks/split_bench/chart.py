"""Draws the parts of steps and users' latencies.

Each model and number of streams has a row of axes: steps at saturation and at the fixed rate, then
distributions of latencies.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.router_bench.figures import Row, distributions, percentile, save

_PARTS = (
    ("device or model", "#4878a8"),
    ("engine CPU", "#e8a33d"),
    ("waiting for the interpreter's lock", "#c44e52"),
    ("waiting for a core", "#e9b3b5"),
)
_COLORS = {"one process": "#7b3294", "pair": "#1b7837"}
_STYLES = {"saturation": "-", "fixed rate": "--"}
# A part narrower than this share of the longest bar gets no figure.
_LEAST_LABEL = 0.16


def draw(medians: Sequence[Row], rows: Sequence[Row], path: Path) -> None:
    """Draw a PNG of `medians` and all `rows`; needs matplotlib."""
    groups = list(dict.fromkeys(row["group"] for row in medians))
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(17, 1.2 + 2.7 * len(groups)), layout="constrained"
    )
    figure.suptitle(
        "One router and one engine: in one interpreter, and as two processes that speak gRPC"
    )
    grid = figure.subplots(len(groups), 4, squeeze=False)
    for group, axes in zip(groups, grid, strict=True):
        own = [row for row in medians if row["group"] == group]
        every = [row for row in rows if row["group"] == group]
        for each, load in zip(axes, _STYLES, strict=False):
            steps = [row for row in own if row["load"] == load]
            if steps:
                _bars(each, steps, f"{group}, {_named(load, steps)}")
            else:
                each.set_axis_off()
        _latencies(axes[2], every, "ttfts_ms", "time to first token, ms")
        _latencies(axes[3], every, "gaps_ms", "inter-token latency, ms")
    _legends(figure)
    save(figure, path)


def _legends(figure: Any) -> None:
    patch = importlib.import_module("matplotlib.patches").Patch
    line = importlib.import_module("matplotlib.lines").Line2D
    parts = [patch(color=color, label=f"a step: {label}") for label, color in _PARTS]
    curves = [
        line([], [], color=color, linestyle=style, label=f"{way}, {load}")
        for way, color in _COLORS.items()
        for load, style in _STYLES.items()
    ]
    figure.legend(handles=parts, loc="outside lower left", ncols=2, frameon=False)
    figure.legend(handles=curves, loc="outside lower right", ncols=2, frameon=False)


def _named(load: str, rows: Sequence[Row]) -> str:
    rate = rows[0]["rate"]
    return load if rate is None else f"{rate:.3g} requests/s"


def _widths_ms(row: Row) -> list[float]:
    """Return the widths of `_PARTS`. A device may have hidden waits for a core."""
    core_ms = min(row["core_wait_ms"], row["wait_ms"])
    return [row["device_ms"], row["engine_ms"], row["wait_ms"] - core_ms, core_ms]


def _bars(axes: Any, rows: Sequence[Row], title: str) -> None:
    """Draw a bar for each way, with the parts of its steps."""
    names = [row["way"] for row in rows]
    longest_ms = max(row["period_ms"] for row in rows)
    left = [0.0] * len(rows)
    for index, (_, color) in enumerate(_PARTS):
        widths = [_widths_ms(row)[index] for row in rows]
        drawn = axes.barh(names, widths, left=left, color=color, height=0.6)
        labels = [f"{w:.3g}" if w > _LEAST_LABEL * longest_ms else "" for w in widths]
        axes.bar_label(drawn, labels, label_type="center", color="white", fontsize=9)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for index, row in enumerate(rows):
        text = f"{row['period_ms']:.3g} ms, {row['tokens_per_s']:.0f} tokens/s"
        axes.text(left[index], index, f"  {text}", va="center", fontsize=9)
    axes.set_xlim(0, 1.6 * longest_ms)
    # Room for three bars, so that two are equally thick.
    axes.set_ylim(2.6, -0.6)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("ms a step")
    axes.spines[["top", "right"]].set_visible(False)


def _latencies(axes: Any, rows: Sequence[Row], key: str, label: str) -> None:
    """Draw a curve for each way and load, of the values of all rounds."""
    for load, style in _STYLES.items():
        for way, color in _COLORS.items():
            values = [
                value
                for row in rows
                if (row["way"], row["load"]) == (way, load)
                for value in row.get(key) or ()
            ]
            if values:
                distributions(axes, {way: sorted(values)}, label)
                axes.lines[-1].set(color=color, linestyle=style)
                axes.get_legend().remove()
    _set_log_scale(axes)
    axes.grid(alpha=0.3)


def _set_log_scale(axes: Any) -> None:
    """Set a logarithmic scale with plain numbers, without the few values far below all others."""
    ticker = importlib.import_module("matplotlib.ticker")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=12))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    if axes.lines:
        axes.set_xlim(
            left=min(percentile(list(line.get_xdata()), 0.01) for line in axes.lines) / 1.2
        )
