"""Dashboards, alerts, scalers and the page of metrics name what there is."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from contract.metrics_page import PAGE, router_families, shard_families, with_tables
from support.promql import groupings, selectors

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
# What Prometheus itself adds to whatever it scrapes, and what the chart's monitors do.
SCRAPED = {"instance", "job", "le", "namespace", "release"}


@cache
def series() -> dict[str, set[str]]:
    """Return the series that may be named, each with its labels."""
    families = [*router_families(), *shard_families()]
    ours = {name: {*family.labels} | SCRAPED for family in families for name in family.series}
    return {**ours, "up": SCRAPED}


def dashboard(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def queries() -> Iterator[tuple[str, str]]:
    """Yield the place of each query, and the query."""
    for path in DASHBOARDS:
        for panel in dashboard(path)["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']}", target["expr"]
        for variable in dashboard(path)["templating"]["list"]:
            if variable["type"] != "query":
                continue
            yield f"{path.stem}: {variable['name']}", variable["query"]["query"]
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        yield rule["alert"], _without_made_labels(rule["expr"])


def _without_made_labels(query: str) -> str:
    """Remove from `on (...)` the labels that `label_replace` makes: no series has them."""
    made = re.findall(r'label_replace\(.*?, "(\w+)", "\$1"', query)
    return re.sub(rf"\bon \(({'|'.join(made)})\)", "on ()", query) if made else query


def faults(query: str) -> Iterator[str]:
    known: set[str] = set()
    for name, labels in selectors(query):
        if name not in series():
            yield f"{name} is not counted"
            continue
        known |= series()[name]
        if unknown := labels - series()[name]:
            yield f"{name} has no {sorted(unknown)}"
    if unknown := groupings(query) - known:
        yield f"nothing here has {sorted(unknown)}"


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_every_query_names_a_metric_that_there_is_with_labels_that_it_has(
    place: str, query: str
) -> None:
    assert list(selectors(query)), "names nothing of ours"
    assert list(faults(query)) == []


def test_what_scalers_of_the_chart_look_at_is_counted() -> None:
    texts = "\n".join(path.read_text() for path in (DEPLOY / "helm").rglob("templates/*.yaml"))
    named = set(re.findall(r"\bpenstock_(?:router|shard)_\w+", texts))
    assert named
    assert named <= set(series())


def labelled() -> Iterator[tuple[str, str, set[str]]]:
    """Yield the place, the query and the labels shown, for each query of a panel or an alert."""
    for path in DASHBOARDS:
        for panel in dashboard(path)["panels"]:
            for target in panel.get("targets", ()):
                labels = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
                yield f"{path.stem}: {panel['title']}", target["expr"], labels
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        said = " ".join(rule["annotations"].values())
        yield (
            rule["alert"],
            _without_made_labels(rule["expr"]),
            set(re.findall(r"\$labels\.(\w+)", said)),
        )


def shown(query: str) -> set[str]:
    """Labels that the result may have: those it is grouped by, or else all of its series."""
    of_series = set[str]().union(*(series().get(name, set()) for name, _ in selectors(query)))
    return groupings(query) or of_series


@pytest.mark.parametrize(("place", "query", "labels"), list(labelled()))
def test_a_legend_and_what_an_alert_says_name_labels_of_the_result(
    place: str, query: str, labels: set[str]
) -> None:
    assert labels <= shown(query)


def test_a_label_that_a_result_has_not_is_found() -> None:
    assert "shard" not in shown("sum by (model) (penstock_router_shard_running)")
    assert "model" not in shown("penstock_shard_running")


@pytest.mark.parametrize(
    "query",
    [
        "rate(penstock_router_request_total[5m])",
        'penstock_router_requests_total{state="200"}',
        "sum by (shard) (penstock_shard_running)",
        "penstock_router_first_token_seconds",
    ],
)
def test_a_query_that_would_find_nothing_is_found(query: str) -> None:
    assert len(list(faults(query))) == 1


def test_the_page_of_metrics_shows_each_as_it_is() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "in tests/: python -m contract.metrics_page"


def test_the_dashboards_are_what_their_description_says() -> None:
    files = runpy.run_path(str(DEPLOY / "grafana" / "dashboards.py"))["files"]()
    assert {path.name: path.read_text() for path in DASHBOARDS} == files, (
        "run python deploy/grafana/dashboards.py"
    )


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_no_two_panels_lie_on_each_other(path: Path) -> None:
    panels = dashboard(path)["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
