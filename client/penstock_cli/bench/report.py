"""Summarizes a load: JSON for programs, a table and plots for people."""

from __future__ import annotations

import collections
import importlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_cli.bench.load import Answer, Load
from penstock_common.logs import escape

_LATENCIES = {
    "first token": "ttft_ms",
    "inter-token": "inter_token_ms",
    "per token": "tpot_ms",
    "end to end": "e2e_ms",
}


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in ms that a good answer meets."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf

    def is_met_by(self, answer: Answer) -> bool:
        fast = answer.ttft_s * 1e3 <= self.ttft_ms and answer.tpot_s * 1e3 <= self.tpot_ms
        return fast and not answer.error


def summarize(
    load: Load,
    answers: Sequence[Answer],
    *,
    wall_s: float,
    client_cpu_s: float,
    objective: Objective | None = None,
) -> dict[str, Any]:
    """Summarize a load as a JSON object. Rates count only complete answers, over all of `wall_s`.

    `inter_token_ms` are gaps between events, which may carry several tokens; `tpot_ms` is a
    request's mean time per token. With an objective, `goodput` has the share of all requests
    (including failed ones) that met it, and their number per second.
    """
    good = [answer for answer in answers if not answer.error]
    output_tokens = sum(answer.output_tokens for answer in good)
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    summary: dict[str, Any] = {
        "load": load.name,
        "open_loop": load.open_loop,
        # JSON has no infinity.
        "level": None if math.isinf(load.level) else load.level,
        "requests": len(good),
        "failed": len(answers) - len(good),
        "errors": dict(collections.Counter(a.error_kind for a in answers if a.error)),
        "first_error": next((answer.error for answer in answers if answer.error), ""),
        "wall_s": wall_s,
        "client_cpu_s": client_cpu_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(good) / wall_s,
        "output_tokens_per_s": output_tokens / wall_s,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / wall_s,
        "ttft_ms": _spread_ms([answer.ttft_s for answer in good]),
        "inter_token_ms": _spread_ms([gap for answer in good for gap in answer.gaps_s]),
        "tpot_ms": _spread_ms([answer.tpot_s for answer in good if answer.output_tokens > 1]),
        "e2e_ms": _spread_ms([answer.e2e_s for answer in good]),
    }
    if objective:
        met = sum(objective.is_met_by(answer) for answer in answers)
        summary["goodput"] = {"share": met / max(len(answers), 1), "requests_per_s": met / wall_s}
    return summary


def _spread_ms(values_s: Sequence[float]) -> dict[str, float | None]:
    if not values_s:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    cuts = statistics.quantiles([*values_s] * (1 + (len(values_s) == 1)), n=100, method="inclusive")
    return {
        "mean": statistics.fmean(values_s) * 1e3,
        "p50": cuts[49] * 1e3,
        "p90": cuts[89] * 1e3,
        "p99": cuts[98] * 1e3,
    }


def table(summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['load']}: {summary['requests']} requests in {summary['wall_s']:.1f} s, "
        f"{summary['failed']} failed",
        f"{summary['output_tokens_per_s']:.1f} output tokens/s, "
        f"{summary['total_tokens_per_s']:.1f} with the prompts "
        f"({summary['prompt_tokens']} prompt and {summary['output_tokens']} output tokens)",
        f"{'ms':<14}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99")),
    ]
    lines += [
        f"{name:<14}" + "".join(_cell(value) for value in summary[key].values())
        for name, key in _LATENCIES.items()
    ]
    if goodput := summary.get("goodput"):
        lines.append(f"within the objective: {goodput['share']:.1%}, "
                     f"{goodput['requests_per_s']:.2f} requests/s")  # fmt: skip
    if summary["errors"]:
        counts = ", ".join(f"{kind} {count}" for kind, count in summary["errors"].items())
        lines += [f"errors: {counts}", f"first error: {escape(summary['first_error'])}"]
    return "\n".join(lines)


def _cell(value_ms: float | None) -> str:
    return f"{'-':>10}" if value_ms is None else f"{value_ms:>10.1f}"


def plot(summaries: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot TTFT, inter-token latency and throughput against load, as a PNG. Needs matplotlib. Raise
    OSError if the file cannot be written.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(12, 4), layout="constrained"
    )
    # The loads are evenly spaced, not to scale, because "all at once" may be one of them.
    names = ["all at once" if s["level"] is None else f"{s['level']:g}" for s in summaries]
    first, gaps, throughput = figure.subplots(1, 3)
    for axes, key, title in (
        (first, "ttft_ms", "time to first token, ms"),
        (gaps, "inter_token_ms", "inter-token latency, ms"),
    ):
        for percentile in ("p50", "p90", "p99"):
            values = [summary[key][percentile] for summary in summaries]
            axes.plot(names, [math.nan if v is None else v for v in values], "o-", label=percentile)
        axes.set_title(title)
        axes.legend()
    throughput.plot(names, [summary["output_tokens_per_s"] for summary in summaries], "o-")
    throughput.set_title("output tokens/s")
    for axes in (first, gaps, throughput):
        axes.set_xlabel("requests/s" if summaries[0]["open_loop"] else "streams")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
