"""Writes the dashboards to the folder dashboards: `python deploy/grafana/dashboards.py`.

Panels differ in title, unit and queries; all other settings are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
# Of a panel, in a grid of 24 columns.
_WIDTH, _HEIGHT = 8, 8
# The Prometheus that is chosen at the top of a dashboard.
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Labels that select all series. The chart's monitors set them; without the chart, All selects
# series without them.
_SCOPE = ("namespace", "release")


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph. Each query has a legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`variables` are names with a query for their values."""

    uid: str
    title: str
    variables: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]


def rate(series: str) -> str:
    return f"rate({series}[$__rate_interval])"


def quantiles(
    name: str, where: str = "", shares: Sequence[float] = (0.5, 0.9, 0.99)
) -> tuple[tuple[str, str], ...]:
    """Return queries for quantiles of a histogram."""
    buckets = f"sum by (le) ({rate(f'{name}_bucket{where}')})"
    return tuple((f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in shares)


def mean(name: str, where: str = "", by: str = "") -> str:
    """Return the query for a histogram's mean."""
    by = f" by ({by})" if by else ""
    return f"sum{by} ({rate(f'{name}_sum{where}')}) / sum{by} ({rate(f'{name}_count{where}')})"


R, S = "penstock_router_", "penstock_shard_"
MODEL = '{model=~"$model"}'
INSTANCE = '{instance=~"$instance"}'
# Without probes.
ASKED = f'{R}requests_total{{outcome!="probe"}}'
FAILED = f'{R}requests_total{{outcome=~"error|timeout"}}'
CONTINUED = f'{R}fleet_events_total{{event="continued"}}'

OVERVIEW = Dashboard(
    "penstock-overview",
    "penstock: what clients see",
    (("model", f"label_values({R}model_shards_serving, model)"),),
    (
        Row(
            "Requests",
            (
                Panel(
                    "Requests by outcome",
                    "reqps",
                    (
                        (
                            f"sum by (outcome) ({rate(ASKED)})",
                            "{{outcome}}",
                        ),
                    ),
                    "stop and length are normal ends; probes are left out.",
                    stacked=True,
                ),
                Panel(
                    "Share of failed requests",
                    "percentunit",
                    (
                        (
                            f"sum({rate(FAILED)}) / sum({rate(ASKED)})",
                            "error or timeout",
                        ),
                    ),
                    "Requests that were refused, or whose clients left, do not count as failed.",
                ),
                Panel(
                    "Failed requests by model",
                    "reqps",
                    ((f"sum by (model) ({rate(FAILED)})", "{{model}}"),),
                    "error or timeout. Without a name: the model was not known, or not asked for.",
                    stacked=True,
                ),
                Panel(
                    "Refused because of overload",
                    "reqps",
                    ((f"sum by (reason) ({rate(R + 'refused_total')})", "{{reason}}"),),
                    "Answered with 429.",
                    stacked=True,
                ),
                Panel(
                    "Time to the first token",
                    "s",
                    quantiles(f"{R}first_token_seconds", MODEL),
                    "From a request's arrival.",
                ),
                Panel("Time between tokens", "s", quantiles(f"{R}between_tokens_seconds", MODEL)),
                Panel("Request latency", "s", quantiles(f"{R}generation_seconds", MODEL)),
                Panel(
                    "Where the time goes",
                    "s",
                    tuple(
                        (mean(f"{R}{part}_seconds", MODEL), part)
                        for part in ("prepare", "queue", "prefill", "decode")
                    ),
                    "Means: tokenizing, waiting in router and shard, prefill, decode.",
                    stacked=True,
                ),
                Panel(
                    "In flight and waiting",
                    "short",
                    (
                        (f"sum({R}sequences_in_flight)", "with shards"),
                        (f"sum({R}sequences_queued)", "queued in the router"),
                        (f"sum({R}shard_waiting)", "queued in shards"),
                        (f"sum({R}requests_held) or vector(0)", "held until a shard is there"),
                    ),
                ),
            ),
        ),
        Row(
            "Tokens",
            (
                Panel(
                    "Tokens per second",
                    "short",
                    (
                        (f"sum({rate(R + 'output_tokens_total' + MODEL)})", "out"),
                        (f"sum({rate(R + 'prompt_tokens_total' + MODEL)})", "in"),
                        (f"sum({rate(R + 'cached_tokens_total' + MODEL)})", "in, cached"),
                    ),
                ),
                Panel(
                    "Lengths",
                    "short",
                    (
                        (mean(f"{R}request_prompt_tokens", MODEL), "prompt, mean"),
                        (mean(f"{R}request_output_tokens", MODEL), "answer, mean"),
                    ),
                ),
                Panel(
                    "Tokens by key",
                    "short",
                    (
                        (
                            f"topk(10, sum by (key) ({rate(R + 'key_tokens_total' + MODEL)}))",
                            "{{key}}",
                        ),
                    ),
                    "Per second, of the ten that use most; where routers have --metrics-by-key.",
                    stacked=True,
                ),
                Panel(
                    "Wasted tokens",
                    "short",
                    ((f"sum by (cause) ({rate(R + 'wasted_tokens_total')})", "{{cause}}"),),
                    "Per second, of requests that were cut short.",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Trouble",
            (
                Panel(
                    "Failovers",
                    "short",
                    (
                        (
                            f"sum by (reason) ({rate(CONTINUED)})",
                            "{{reason}}",
                        ),
                    ),
                    "Sequences per second, by why the previous shard failed.",
                    stacked=True,
                ),
                Panel(
                    "Pause at a failover",
                    "s",
                    quantiles(f"{R}failover_gap_seconds", MODEL, (0.5, 0.99)),
                ),
                Panel(
                    "Sequences that were cut short",
                    "short",
                    ((f"sum by (cause) ({rate(R + 'aborts_total')})", "{{cause}}"),),
                    "Per second. stop_string is a normal end.",
                    stacked=True,
                ),
                Panel(
                    "Shards",
                    "short",
                    (
                        (f"max({R}shards_serving)", "serving"),
                        (f"max({R}shards)", "known"),
                    ),
                ),
                Panel(
                    "Shards serving each model",
                    "short",
                    ((f"max by (model) ({R}model_shards_serving)", "{{model}}"),),
                    "A model that is down, or was scaled to zero, is at 0.",
                ),
                Panel(
                    "Shards that do not serve",
                    "short",
                    (
                        (
                            f'max by (shard, state) ({R}shard_state{{state!="serving"}})',
                            "{{shard}} {{state}}",
                        ),
                    ),
                    "Each for as long as it is loading, draining or gone. Empty: all serve.",
                    stacked=True,
                ),
                Panel(
                    "The event loop's lag",
                    "s",
                    (
                        (f"max({R}loop_lag_worst_seconds)", "worst of 10 s"),
                        *quantiles(f"{R}loop_lag_seconds", "", (0.99,)),
                    ),
                    "If it stays high, the router needs more workers.",
                ),
                Panel(
                    "HTTP requests by status",
                    "reqps",
                    (
                        (
                            f"sum by (status) ({rate(ASKED)})",
                            "{{status}}",
                        ),
                    ),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "What is kept and what is seen",
            (
                Panel(
                    "Calls of the response store that failed",
                    "short",
                    (
                        (
                            f"sum by (instance) ({rate(R + 'store_failures_total')})",
                            "{{instance}}",
                        ),
                    ),
                    "Per second. Each is a response that was not stored, or not found.",
                    stacked=True,
                ),
                Panel(
                    "Audit records that were lost",
                    "short",
                    (
                        (
                            f"sum by (instance) ({rate(R + 'audit_dropped_total')})",
                            "{{instance}}",
                        ),
                    ),
                    "Per second.",
                    stacked=True,
                ),
                Panel(
                    "Scraped by Prometheus",
                    "bool_yes_no",
                    (
                        ('up{job="penstock-router"}', "router {{instance}}"),
                        ('up{job="penstock-shard"}', "shard {{instance}}"),
                    ),
                    "No: its other panels are empty, and alerts about it cannot fire.",
                ),
            ),
        ),
    ),
)


def by_instance(name: str, per_second: bool = False) -> tuple[tuple[str, str], ...]:
    series = f"{S}{name}{INSTANCE}"
    return ((rate(series) if per_second else series, "{{instance}}"),)


SHARDS = Dashboard(
    "penstock-shards",
    "penstock: what the engines do",
    (("instance", f"label_values({S}info, instance)"),),
    (
        Row(
            "Steps",
            (
                Panel("Step duration", "s", quantiles(f"{S}step_seconds", INSTANCE)),
                Panel(
                    "Batch size",
                    "short",
                    ((mean(f"{S}step_sequences", INSTANCE, "instance"), "{{instance}}"),),
                    "Sequences in a step, mean.",
                ),
                Panel(
                    "Tokens computed per second",
                    "short",
                    (
                        (
                            f"sum by (kind) ({rate(S + 'computed_tokens_total' + INSTANCE)})",
                            "{{kind}}",
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Tokens in a step",
                    "short",
                    ((mean(f"{S}step_tokens", INSTANCE, "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Share of time in steps",
                    "percentunit",
                    by_instance("step_seconds_sum", per_second=True),
                    "Near 1, the engine never waits for work.",
                ),
                Panel(
                    "Output tokens per second",
                    "short",
                    by_instance("output_tokens_total", per_second=True),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Queue and memory",
            (
                Panel("Running", "short", by_instance("running")),
                Panel("Waiting", "short", by_instance("waiting")),
                Panel(
                    "Prefill tokens left to compute",
                    "short",
                    by_instance("queued_tokens"),
                ),
                Panel("KV cache in use", "percentunit", by_instance("kv_used_ratio")),
                Panel(
                    "Prefix cache hits, share of prompt tokens",
                    "percentunit",
                    (
                        (
                            f"sum by (instance) ({rate(S + 'cached_tokens_total' + INSTANCE)}) / "
                            f"sum by (instance) ({rate(S + 'prompt_tokens_total' + INSTANCE)})",
                            "{{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Preemptions",
                    "short",
                    by_instance("preemptions_total", per_second=True),
                    "Sequences per second. More than a few mean that KV memory is short.",
                ),
                Panel(
                    "KV blocks for the disk",
                    "short",
                    (
                        (
                            rate(f"{S}kv_disk_saved_blocks_total{INSTANCE}"),
                            "{{instance}} written",
                        ),
                        (
                            rate(f"{S}kv_disk_dropped_blocks_total{INSTANCE}"),
                            "{{instance}} not taken",
                        ),
                    ),
                    "Per second, with --kv-disk. A disk that is full or fails takes none.",
                ),
                Panel(
                    "KV blocks of peers and disks that were no good",
                    "short",
                    (
                        (rate(f"{S}kv_refused_blocks_total{INSTANCE}"), "{{instance}} peers"),
                        (rate(f"{S}kv_disk_damaged_blocks_total{INSTANCE}"), "{{instance}} disk"),
                    ),
                    "Per second; their tokens are computed. Above 0 something is not sound.",
                    stacked=True,
                ),
                Panel(
                    "Waiting for the first step",
                    "s",
                    quantiles(f"{S}queue_seconds", INSTANCE, (0.5, 0.99)),
                ),
                Panel(
                    "From the first step to the first token",
                    "s",
                    quantiles(f"{S}prefill_seconds", INSTANCE, (0.5, 0.99)),
                ),
                Panel(
                    "Request duration",
                    "s",
                    quantiles(f"{S}request_seconds", INSTANCE, (0.5, 0.99)),
                ),
            ),
        ),
        Row(
            "Outcomes",
            (
                Panel(
                    "Requests by outcome",
                    "reqps",
                    (
                        (
                            f"sum by (outcome) ({rate(S + 'requests_total' + INSTANCE)})",
                            "{{outcome}}",
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Tokens of aborted requests",
                    "short",
                    by_instance("aborted_tokens_total", per_second=True),
                    "Per second.",
                ),
                Panel(
                    "Engines that died",
                    "short",
                    (
                        (
                            f"increase({S}engine_restarts_total{INSTANCE}[$__range])",
                            "{{instance}}",
                        ),
                    ),
                    "Within the time range shown.",
                ),
                Panel(
                    "Serving",
                    "bool_yes_no",
                    (
                        (f"{S}serving{INSTANCE}", "{{instance}}"),
                        (f"{S}draining{INSTANCE}", "{{instance}} draining"),
                    ),
                ),
                Panel(
                    "Shards as the router sees them",
                    "short",
                    ((f"sum by (state) ({R}shard_state)", "{{state}}"),),
                    stacked=True,
                ),
                Panel(
                    "Models served",
                    "short",
                    (
                        (
                            f"count by (model, version, dtype, device) ({S}info)",
                            "{{model}} {{dtype}} on {{device}}, {{version}}",
                        ),
                    ),
                    stacked=True,
                ),
            ),
        ),
    ),
)


# ---- what Grafana reads ------------------------------------------------------------------------


def grafana(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["penstock"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables(dashboard)},
        "panels": _placed(dashboard.rows),
    }


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    """The variables of a dashboard: data source, labels of all series, and its own."""
    source = {"name": "datasource", "label": "data source", "type": "datasource"}
    scope = [
        _variable(name, f"label_values({scoped(R + 'shards', _SCOPE[:index])}, {name})")
        for index, name in enumerate(_SCOPE)
    ]
    own = [_variable(name, scoped(query)) for name, query in dashboard.variables]
    return [{**source, "query": "prometheus", "current": {}}, *scope, *own]


def scoped(query: str, by: Sequence[str] = _SCOPE) -> str:
    """Add the chosen labels to each series of the query."""
    chosen = ",".join(f'{name}=~"${name}"' for name in by)
    labelled = re.sub(rf"\b(?:(?:{R}|{S})\w+|up(?={{))", rf"\g<0>{{{chosen}}}", query)
    return labelled.replace("}{", ",").replace("{}", "")


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": place})
        y += 1
        for index, panel in enumerate(row.panels):
            place = {"x": index % 3 * _WIDTH, "y": y + index // 3 * _HEIGHT}
            place |= {"w": _WIDTH, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        y += -(-len(row.panels) // 3) * _HEIGHT
    return panels


def _panel(panel: Panel) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none"}
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": stacking}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": scoped(expr), "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def files() -> dict[str, str]:
    """The content of each file."""
    dashboards = {"overview.json": OVERVIEW, "shards.json": SHARDS}
    return {name: json.dumps(grafana(each), indent=1) + "\n" for name, each in dashboards.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
