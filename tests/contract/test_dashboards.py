"""Dashboards can be imported as they are: what differs among Grafanas is a variable."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.promql import selectors

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
CHOSEN = '{namespace=~"$namespace",release=~"$release"'

every_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def loaded(path: Path) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(path.read_text())
    return dashboard


def sources(node: Any) -> Iterator[Any]:
    """Every data source that anything names, however deep."""
    if isinstance(node, dict):
        if "datasource" in node:
            yield node["datasource"]
        for value in node.values():
            yield from sources(value)
    if isinstance(node, list):
        for value in node:
            yield from sources(value)


@every_dashboard
def test_a_dashboard_asks_for_nothing_when_it_is_imported(path: Path) -> None:
    dashboard = loaded(path)
    # A number of one database, and questions that only the form of the import can answer.
    assert not {"id", "__inputs", "__requires"} & dashboard.keys()
    variables = dashboard["templating"]["list"]
    names = [variable["name"] for variable in variables]
    assert names[:3] == ["datasource", "namespace", "release"]
    assert len(names) == len(set(names)) == 4


@every_dashboard
def test_whoever_looks_chooses_the_data_source(path: Path) -> None:
    dashboard = loaded(path)
    provisioned = yaml.safe_load(
        (GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    )
    (kind,) = (each["type"] for each in provisioned["datasources"])
    first = dashboard["templating"]["list"][0]
    assert (first["type"], first["query"]) == ("datasource", kind)
    named = list(sources(dashboard))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    # Panels, and the variables but that one.
    assert len(named) == len(panels) + 3
    assert all(each == {"type": kind, "uid": "${datasource}"} for each in named)


@every_dashboard
def test_every_series_of_every_panel_is_of_the_namespaces_and_releases_that_are_chosen(
    path: Path,
) -> None:
    for panel in loaded(path)["panels"]:
        for target in panel.get("targets", ()):
            series = list(selectors(target["expr"]))
            assert series, panel["title"]
            assert target["expr"].count(CHOSEN) == len(series), panel["title"]


@every_dashboard
def test_variables_offer_what_those_before_them_leave(path: Path) -> None:
    _, namespace, release, own = loaded(path)["templating"]["list"]
    assert namespace["query"]["query"] == "label_values(penstock_router_shards, namespace)"
    assert release["query"]["query"] == (
        'label_values(penstock_router_shards{namespace=~"$namespace"}, release)'
    )
    assert CHOSEN in own["query"]["query"]
    for variable in (namespace, release, own):
        # Where no series has the label, as on one machine, nothing is offered, and all match.
        assert (variable["includeAll"], variable["allValue"]) == (True, ".*")


@pytest.mark.parametrize(
    ("query", "chosen"),
    [
        ("penstock_shard_running", f"penstock_shard_running{CHOSEN}}}"),
        ('rate(penstock_router_x{a="b"}[5m])', f'rate(penstock_router_x{CHOSEN},a="b"}}[5m])'),
        ('up{job="a"} == 0', f'up{CHOSEN},job="a"}} == 0'),
        ("sum by (model) (up) or vector(0)", "sum by (model) (up) or vector(0)"),
    ],
)
def test_a_query_is_about_what_is_chosen_without_saying_so(query: str, chosen: str) -> None:
    assert runpy.run_path(str(GRAFANA / "dashboards.py"))["scoped"](query) == chosen
