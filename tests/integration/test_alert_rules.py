"""Alerts and histories that Prometheus' own tester replays: what is no fault fires nothing, what is
one fires also where it comes and goes, and what an alert says can be read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from integration.test_metrics import (
    BUSY,
    FAILING,
    OTHER,
    SERVING,
    WELL,
    again,
    alert_rules,
    case,
    check_rules,
    lost_now_and_then,
    state_of,
)

# ---- histories ---------------------------------------------------------------------------------

# An hour of samples a minute apart.
NO_FAULT: dict[str, dict[str, str]] = {
    "a shard is replaced, and its model takes twelve minutes to load": {
        state_of("t:1", "serving"): "1x35 stale _x11 1x13",
        state_of("t:1", "gone"): "_x36 1 stale",
        state_of("t:1", "loading"): "_x37 1x9 stale",
    },
    "the only shard is restarted, and requests of a minute fail": {
        OTHER: "1x44 0 1x15",
        'penstock_router_requests_total{outcome="stop",model="other"}': "0+90x44 3960+90x15",
        'penstock_router_requests_total{outcome="error",model="other"}': "0x44 90x15",
    },
    "a router is started again twice": dict.fromkeys(
        (OTHER, state_of("t:1", "serving")), "1x40 stale 1x4 stale 1x20"
    ),
}


@pytest.mark.parametrize("what", NO_FAULT)
def test_what_is_no_fault_fires_nothing_at_any_time(tmp_path: Path, what: str) -> None:
    series = {**WELL, **NO_FAULT[what]}
    check_rules(tmp_path, [case(series, {}, at=f"{minute}m") for minute in range(30, 60)])


NEITHER_STARTS_ANEW = {
    "a router is started again": {state_of("t:1", "gone"): again(*(1,) * 9, "stale")},
    "it serves for a moment": {
        state_of("t:1", "loading"): again(*(1,) * 8, "stale"),
        state_of("t:1", "serving"): again(*("stale",) * 8, 1),
    },
}


@pytest.mark.parametrize("what", NEITHER_STARTS_ANEW)
def test_a_shard_has_not_served_for_long_also_where_meanwhile(tmp_path: Path, what: str) -> None:
    series = {**WELL, **NEITHER_STARTS_ANEW[what]}
    check_rules(tmp_path, [case(series, {"PenstockShardNotServing": 1})])


def test_a_shard_whose_engine_dies_now_and_then_is_not_lost(tmp_path: Path) -> None:
    series = {**WELL, **lost_now_and_then("t:1", "loading")}
    check_rules(tmp_path, [case(series, {})])


@pytest.mark.parametrize(
    ("failing", "firing"),
    [
        # A twentieth of the requests all the time; and all of half a minute.
        ("0+5x240", {"PenstockErrors": 1}),
        ("0x184 25 50x54", {}),
    ],
)
def test_failures_count_of_a_model_that_was_away_for_half_a_minute(
    tmp_path: Path, failing: str, firing: dict[str, int]
) -> None:
    series = {
        "penstock_router_shards_serving": "2x240",
        SERVING: "1x184 0 0 1x54",
        BUSY: "0+95x240",
        FAILING: failing,
    }
    minutes = [f"{minute}m" for minute in (48, 49, 50, 51, 52, 54)]
    check_rules(tmp_path, [case(series, firing, every="15s", at=minute) for minute in minutes])


RESTARTS = 'penstock_shard_engine_restarts_total{instance="s:2"}'


@pytest.mark.parametrize(
    ("deaths", "firing"),
    [("0x110 1x40", {}), ("0x100 1x10 2x40", {"PenstockEngineDied": 1})],
)
def test_one_death_of_an_engine_fires_nothing_whenever_it_is_scraped_and_two_do(
    tmp_path: Path, deaths: str, firing: dict[str, int]
) -> None:
    """Prometheus extrapolates: from samples 25 s apart it mostly computes more than 1 for one
    death.
    """
    series = {"penstock_router_shards_serving": "2x150", SERVING: "2x150", RESTARTS: deaths}
    minutes = [f"{minute}m" for minute in range(48, 56)]
    check_rules(tmp_path, [case(series, firing, every="25s", at=minute) for minute in minutes])


# ---- what alerts say ---------------------------------------------------------------------------

AUDIT_DROPS = 'penstock_router_audit_dropped_total{instance="r:1"}'
LAG = 'penstock_router_loop_lag_worst_seconds{instance="r:1"}'
FIRST_TOKENS = 'penstock_router_first_token_seconds_bucket{model="m",le="%s"}'
# Of samples 25 s apart, with which hardly a number that Prometheus computes is whole.
SAID: list[tuple[str, dict[str, str], str]] = [
    (
        "PenstockEngineDied",
        {RESTARTS: "0x100 1x10 2x40"},
        "The engine of s:2 died 2 times in a quarter of an hour.",
    ),
    (
        "PenstockAuditGaps",
        {AUDIT_DROPS: "0x110 10x40"},
        "r:1 lost 10 records of its audit log.",
    ),
    (
        "PenstockErrors",
        {BUSY: "0+97x150", FAILING: "0+3.3x150"},
        "3 % of requests for m fail.",
    ),
    (
        "PenstockQueueGrows",
        {
            "penstock_router_sequences_queued": "30x150",
            "penstock_router_shard_waiting": "0+1x150",
        },
        "152 sequences wait, and the number does not fall: more shards are needed.",
    ),
    (
        "PenstockFirstTokenLate",
        {
            FIRST_TOKENS % "8": "0+10x150",
            FIRST_TOKENS % "60": "0+12x150",
            FIRST_TOKENS % "+Inf": "0+12x150",
        },
        "One in a hundred first tokens of m takes over 57 s.",
    ),
    (
        "PenstockRouterLate",
        {LAG: "0.7312x150"},
        "The event loop of r:1 is 0.7 s late: it needs CPU time, or more workers.",
    ),
]


@pytest.mark.parametrize(("alert", "series", "summary"), SAID, ids=[said[0] for said in SAID])
def test_an_alert_has_no_more_digits_than_anybody_reads(
    tmp_path: Path, alert: str, series: dict[str, str], summary: str
) -> None:
    (rule,) = (rule for rule in alert_rules() if rule["alert"] == alert)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', next(iter(series))))
    named = {*re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])} & labels.keys()
    expected = {
        "exp_labels": {**rule["labels"], **{name: labels[name] for name in named}},
        "exp_annotations": {**said_of(rule, labels), "summary": summary},
    }
    given = case({"penstock_router_shards_serving": "2x150", **series}, {}, every="25s")
    del given["promql_expr_test"]
    test = {"alertname": alert, "eval_time": "51m", "exp_alerts": [expected]}
    check_rules(tmp_path, [{**given, "alert_rule_test": [test]}])


def said_of(rule: dict[str, Any], labels: dict[str, str]) -> dict[str, str]:
    """Return the annotations of a rule except the summary, with the labels filled in."""
    return {
        name: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
        for name, text in rule["annotations"].items()
        if name != "summary"
    }
