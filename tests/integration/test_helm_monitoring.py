"""The chart's monitors, alerts and dashboards: those of deploy/, about one release."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import helm_python
import pytest
import yaml
from integration.charts import CASES, of_kind, rendered
from integration.manifests import CHART, Resource, render
from integration.test_metrics import program
from support.promql import selectors

DEPLOY = CHART.parents[1]
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]


def alerts_of(release: str) -> Resource:
    (rules,) = of_kind(render(CASES["alerts and dashboards"], release), "PrometheusRule")
    spec: Resource = rules["spec"]
    return spec


JOBS = {"ServiceMonitor": "penstock-router", "PodMonitor": "penstock-shard"}


def test_jobs_have_the_names_that_alerts_and_dashboards_ask_for() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert {job["job_name"] for job in config["scrape_configs"]} == {*JOBS.values()}
    texts = [*DEPLOY.glob("prometheus/*.yml"), *DEPLOY.glob("grafana/dashboards/*.json")]
    asked = re.findall(r'\bup\{[^}]*job=\\?"([^"\\]+)', "\n".join(map(Path.read_text, texts)))
    assert {*asked} <= {*JOBS.values()}
    assert asked


def test_what_monitors_scrape_is_labelled_with_the_release() -> None:
    for kind, key in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
        (monitor,) = of_kind(rendered("monitoring"), kind)
        (endpoint,) = monitor["spec"][key]
        labels = {each["targetLabel"]: each["replacement"] for each in endpoint["relabelings"]}
        assert labels == {"release": "demo", "job": JOBS[kind]}


# ---- alerts ------------------------------------------------------------------------------------


def test_the_charts_alerts_are_those_of_deploy_and_stand_there_only() -> None:
    assert (CHART / "files" / "alerts.yml").resolve() == DEPLOY / "prometheus" / "alerts.yml"
    groups = alerts_of("demo")["groups"]
    assert [group["name"] for group in groups] == [group["name"] for group in RULES]
    for mine, theirs in zip(groups, RULES, strict=True):
        for rule, source in zip(mine["rules"], theirs["rules"], strict=True):
            own = {"namespace": "default", "release": "demo"}
            assert rule["labels"] == {**source["labels"], **own}
            assert {**rule, "labels": {}, "expr": ""} == {**source, "labels": {}, "expr": ""}
            asked = rule["expr"].replace('{namespace="default",release="demo"}', "")
            assert asked.replace('namespace="default",release="demo",', "") == source["expr"]


def test_every_series_of_an_alert_is_of_the_release() -> None:
    rules = [rule for group in alerts_of("demo")["groups"] for rule in group["rules"]]
    for rule in rules:
        named = list(selectors(rule["expr"]))
        assert named, rule["alert"]
        assert all({"namespace", "release"} <= labels for _, labels in named), rule["alert"]


def test_prometheus_finds_them_by_the_labels_of_monitors() -> None:
    (rules,) = of_kind(rendered("alerts and dashboards"), "PrometheusRule")
    assert rules["metadata"]["labels"]["prometheus"] == "main"


def test_an_alert_fires_for_the_release_that_is_in_trouble_and_for_no_other(
    tmp_path: Path,
) -> None:
    files = []
    for release in ("broken", "gone", "well"):
        files.append(f"{release}.yml")
        (tmp_path / files[-1]).write_text(yaml.safe_dump(dict(alerts_of(release))))

    serving = 'penstock_router_shards_serving{namespace="default",release="%s"}'
    series = [
        {"series": serving % "broken", "values": "0x60"},
        {"series": serving % "well", "values": "2x60"},
    ]
    expected = {"PenstockNoShardServes": "broken", "PenstockRouterGone": "gone"}
    fire = [
        {
            "expr": f'count by (release) (ALERTS{{alertname="{alert}",alertstate="firing"}})',
            "eval_time": "50m",
            "exp_samples": [{"labels": f'{{release="{release}"}}', "value": 1}],
        }
        for alert, release in expected.items()
    ]
    tests = {
        "rule_files": files,
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": fire}],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(tests))
    command = [program("promtool"), "test", "rules", str(tmp_path / "cases.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, (checked.stdout + checked.stderr)[-3000:]


def test_a_model_that_scales_to_zero_is_not_down_when_it_has_no_shard() -> None:
    values = {**CASES["keda, to zero"], **CASES["alerts and dashboards"]}
    resources = render(values, "demo")
    (rules,) = of_kind(resources, "PrometheusRule")
    expressions = {
        rule["alert"]: rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]
    }
    # Of two models the one that may have no shard, by all of its names.
    away = r'model!~"|qwen|Qwen/Qwen3-0\\.6B"'
    named = {name for name, expr in expressions.items() if away in expr}
    assert named == {"PenstockModelDown", "PenstockModelFlaps"}


def test_alerts_lead_to_the_runbook_where_it_is_published() -> None:
    """The chart takes the URL from a value; elsewhere the command in the file's head inserts it."""
    url = "https://docs.example.com/penstock/runbook.html"
    values = CASES["alerts and dashboards"]
    rules = {**values["monitoring"]["rules"], "runbookUrl": url}
    rendered = render({"monitoring": {**values["monitoring"], "rules": rules}}, "demo")
    (found,) = of_kind(rendered, "PrometheusRule")
    file = DEPLOY / "prometheus" / "alerts.yml"
    (command,) = re.findall(r"^# +(sed -i .*) alerts.yml$", file.read_text(), re.MULTILINE)
    written = subprocess.run(
        [*shlex.split(command.replace(" -i", "")), str(file)], capture_output=True, check=True
    )
    for groups in (found["spec"]["groups"], yaml.safe_load(written.stdout)["groups"]):
        links = {
            rule["alert"]: rule["annotations"]["runbook"]
            for group in groups
            for rule in group["rules"]
        }
        assert links == {alert: f"{url}#{alert.lower()}" for alert in links}


def test_alerts_without_monitors_are_refused_as_nothing_would_have_their_labels() -> None:
    with pytest.raises(helm_python.HelmRenderError) as refusal:
        render({"monitoring": {"rules": {"enabled": True}}}, "demo")
    assert "monitoring.rules.enabled needs monitoring.enabled" in str(refusal.value)


@pytest.mark.parametrize(
    ("part", "name", "said"),
    [
        ("rules", "alerts.yml", "files/alerts.yml has no alerts"),
        ("dashboards", "dashboards", "files/dashboards is empty"),
    ],
)
def test_a_chart_whose_links_were_lost_says_so(
    tmp_path: Path, part: str, name: str, said: str
) -> None:
    chart = tmp_path / "penstock"
    shutil.copytree(CHART, chart, symlinks=True)
    link = chart / "files" / name
    target = str(link.readlink())
    link.unlink()
    # As Git leaves them on systems without links.
    link.write_text(target)
    values = {"monitoring": {"enabled": True, part: {"enabled": True}}}
    (chart / "files" / ("dashboards" if part == "rules" else "alerts.yml")).unlink()
    with (
        helm_python.Chart.load(chart) as loaded,
        pytest.raises(helm_python.HelmRenderError) as refusal,
    ):
        loaded.render(values, name="demo")
    assert said in str(refusal.value)


# ---- dashboards --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "label"),
    [("alerts and dashboards", {"grafana_dashboard": "1"}), ("dashboards alone", {"d": "1"})],
)
def test_grafanas_sidecar_finds_the_dashboards_of_deploy(name: str, label: dict[str, str]) -> None:
    (found,) = of_kind(rendered(name), "ConfigMap")
    assert found["metadata"]["labels"].items() >= label.items()
    folder = DEPLOY / "grafana" / "dashboards"
    assert (CHART / "files" / "dashboards").resolve() == folder
    shown = {file: json.loads(text) for file, text in found["data"].items()}
    assert shown == {
        f"penstock-{path.name}": json.loads(path.read_text()) for path in folder.glob("*.json")
    }
    # Kubernetes takes no larger ones.
    assert sum(map(len, found["data"].values())) < 1024 * 1024


def test_dashboards_say_in_which_folder_they_are() -> None:
    (found,) = of_kind(rendered("alerts and dashboards"), "ConfigMap")
    assert found["metadata"]["annotations"] == {"grafana_folder": "penstock"}


def test_nothing_for_prometheus_or_grafana_is_made_unasked() -> None:
    kinds = {resource["kind"] for resource in rendered("nothing")}
    assert not kinds & {"PrometheusRule", "ConfigMap", "ServiceMonitor", "PodMonitor"}
    assert "PrometheusRule" not in {resource["kind"] for resource in rendered("monitoring")}


def test_a_packaged_chart_has_them_itself(tmp_path: Path) -> None:
    package = Path(helm_python.package(CHART, destination=tmp_path))
    with tarfile.open(package) as archive:
        files = {member.name: member for member in archive.getmembers()}
    for name in ("alerts.yml", "dashboards/overview.json", "dashboards/shards.json"):
        assert files[f"penstock/files/{name}"].isreg()
