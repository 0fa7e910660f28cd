"""The runbook has an entry for each alert, and what an entry names is there."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator

import pytest
import yaml
from contract.sources import ROOT

from penstock_cli import info, keys
from penstock_client.audit_log import AuditLog
from penstock_common.flags import parser_of
from penstock_router.config import RouterConfig
from penstock_shard.config import ShardConfig

PAGE = (ROOT / "docs" / "runbook.md").read_text("utf-8")
METRICS_PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text("utf-8"))
RULES = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
ENTRIES = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
PARTS = ("**Meaning.**", "**Look.**", "**Do.**")


def test_every_alert_has_an_entry_and_every_entry_an_alert() -> None:
    assert len(RULES) > 10
    assert set(ENTRIES) == set(RULES)


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_says_where_its_entry_is(alert: str) -> None:
    assert RULES[alert]["annotations"]["runbook"] == f"docs/runbook.md#{alert.lower()}"


@pytest.mark.parametrize("alert", RULES)
def test_an_entry_says_what_it_means_where_to_look_and_what_to_do(alert: str) -> None:
    found = re.findall(r"^\*\*\w+\.\*\*", ENTRIES.get(alert, ""), re.MULTILINE)
    assert tuple(found) == PARTS
    _, look, do = re.split(r"^\*\*(?:Look|Do)\.\*\*", ENTRIES[alert], flags=re.MULTILINE)
    assert len(re.findall(r"^\d\. ", look, re.MULTILINE)) >= 2
    assert re.findall(r"^- ", do, re.MULTILINE)


@pytest.mark.parametrize("alert", RULES)
def test_numbers_that_an_alert_says_are_rounded(alert: str) -> None:
    said = " ".join(RULES[alert]["annotations"].values())
    shown = [part for part in re.findall(r"\{\{(.*?)\}\}", said) if "$value" in part]
    # A duration of a minute and more is whole by itself.
    rounded = r' (printf "%\.[01]f" \$value|\$value \| humanizeDuration|if lt \$value 0\.0) '
    assert [part for part in shown if not re.fullmatch(rounded, part)] == []


def test_the_page_of_metrics_has_each_alert_with_its_entry() -> None:
    listed = re.findall(r"^\| \[`(\w+)`\]\(runbook\.md#(\w+)\)", METRICS_PAGE, re.MULTILINE)
    assert sorted(listed) == sorted((alert, alert.lower()) for alert in RULES)


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the flags of a parser and of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from flags_of(command)


def test_flags_of_the_runbook_exist() -> None:
    configured = [parser_of(config, "", "") for config in (RouterConfig, ShardConfig)]
    parsers = [*configured, info._parser(()), keys._parser()]
    there = {name for parser in parsers for name in flags_of(parser)}
    # Commands of others: docker, kubectl, journalctl, systemctl.
    there |= {"--profile", "--no-log-prefix", "--no-color", "--detach", "--no-deps", "--format"}
    there |= {"--previous", "--grace-period", "--unit", "--output", "--property", "--live"}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", PAGE))
    assert len(named) > 15
    assert named - there == set()


def test_dashboards_and_panels_of_the_runbook_exist() -> None:
    files = (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")
    dashboards = [json.loads(path.read_text("utf-8")) for path in files]
    panels = {panel["title"] for dashboard in dashboards for panel in dashboard["panels"]}
    prose = re.sub(r"`[^`]*`|```.*?```", "", PAGE, flags=re.DOTALL)
    named = set(re.findall(r'"([^"]+)"', prose))
    assert len(named) > 5
    assert named - panels == set()
    titles = {dashboard["title"].removeprefix("penstock: ") for dashboard in dashboards}
    assert set(re.findall(r"\*(what [^*]+)\*", PAGE)) == titles


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("response store", "router/penstock_router/store/response_store.py"),
        ("audit log", "client/penstock_client/audit_log.py"),
        ("drops records", "client/penstock_client/audit_log.py"),
        ("KV blocks on disk", "shard/penstock_shard/kv_transfer/disk_tier.py"),
    ],
)
def test_lines_of_logs_that_the_runbook_tells_to_look_for_are_written(
    words: str, path: str
) -> None:
    assert words in PAGE
    assert words in (ROOT / path).read_text("utf-8")


def test_the_audit_log_keeps_as_many_files_as_the_runbook_says() -> None:
    defaults = AuditLog.__init__.__kwdefaults__
    assert defaults is not None
    assert f"`PATH.1` to `PATH.{defaults['keep']}`" in PAGE
