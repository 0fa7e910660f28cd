"""A real Prometheus scrapes a running fleet: every query of the dashboards finds something.

Prometheus is Debian's; without it these tests are skipped, or fail where all must run.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from contract.metrics_page import router_families, shard_families
from integration.manifests import read_compose
from prometheus_client.parser import text_string_to_metric_families
from support.processes import Router, Shard, free_port, running, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRAPE_S = 0.25
_START_S = 60.0
# Of a query: as Grafana would put in, and as long as the load lasts.
_VARIABLES = {
    **{"$__rate_interval": "3s", "$__range": "1m"},
    **{f"${name}": ".*" for name in ("namespace", "release", "model", "instance")},
}


def program(name: str, package: str = "prometheus") -> str:
    """Skips the test without it, or fails it where all must run: CI sets CI."""
    found = shutil.which(name)
    if found is None:
        missing = f"no {name}; it is in Debian's package {package}"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def compose_arguments(folders: dict[str, Path]) -> list[str]:
    """Return the arguments of Prometheus in compose.yaml, with folders of this machine."""
    service = read_compose(DEPLOY / "compose.yaml", {}, "monitoring")["prometheus"]
    assert {volume.split(":")[1] for volume in service["volumes"]} == set(folders)
    arguments = shlex.split(service["command"])
    for inside, here in folders.items():
        arguments = [argument.replace(f"={inside}", f"={here}") for argument in arguments]
    return arguments


# ---- what runs ---------------------------------------------------------------------------------


class Prometheus:
    """A Prometheus with the configuration of deploy/prometheus. It scrapes the given targets, and
    more often.
    """

    def __init__(
        self, folder: Path, targets: dict[str, list[str]], rules: str | None = None
    ) -> None:
        """Start it. `rules` replace the alerts of deploy/prometheus."""
        folder.mkdir()
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        every = f"{SCRAPE_S * 1000:g}ms"
        config["global"] = {"scrape_interval": every, "evaluation_interval": every}
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        rules = rules or (DEPLOY / "prometheus" / "alerts.yml").read_text()
        (folder / "alerts.yml").write_text(rules)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    program("prometheus"),
                    *compose_arguments({"/etc/prometheus": folder, "/prometheus": folder / "data"}),
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def get(self, path: str, **parameters: object) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]

    def scrapes_all(self) -> bool:
        try:
            targets = self.get("targets")["activeTargets"]
        except OSError:
            return False
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def values(self, query: str, start_s: float, end_s: float) -> list[float]:
        """Return all values that a graph of the query would show for this time."""
        for name, value in _VARIABLES.items():
            query = query.replace(name, value)
        found = self.get("query_range", query=query, start=start_s, end=end_s, step=0.5)
        values = (float(value) for line in found["result"] for _, value in line["values"])
        return [value for value in values if not math.isnan(value)]

    def firing(self) -> set[tuple[str, str]]:
        """Return each alert that fires now, with the model, shard or router that it names."""
        alerts = [each for each in self.get("alerts")["alerts"] if each["state"] == "firing"]
        names = ("model", "shard", "instance")
        return {
            (
                each["labels"]["alertname"],
                next((each["labels"][name] for name in names if name in each["labels"]), ""),
            )
            for each in alerts
        }

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@dataclass(frozen=True)
class Watched:
    """A fleet that was under load, and what watched it meanwhile."""

    router: Router
    shards: list[Shard]
    metrics_ports: list[int]
    prometheus: Prometheus
    # When, in Unix time.
    start_s: float
    end_s: float


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Shard]]:
    """Two shards, by the ports of their metrics."""
    folder = tmp_path_factory.mktemp("metered")
    flags = ("--step-ms", "4", "--metrics-names", "vllm,tgi", "--max-num-seqs", "8")
    shards = {
        port: Shard(folder / f"shard-{port}", *flags, "--metrics-port", str(port))
        for port in (free_port(), free_port())
    }
    with running(*shards.values()):
        yield shards


@pytest.fixture(scope="module")
def watched(
    metered: dict[int, Shard], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    program("prometheus")
    folder = tmp_path_factory.mktemp("watched")
    ports, shards = list(metered), list(metered.values())
    limits = ("--max-concurrent-requests", "12", "--max-queued-requests", "2")
    addresses = [shard.address for shard in shards]
    shown = ("--metrics-names", "vllm,tgi", "--metrics-by-key")
    router = Router(folder / "router", addresses, *shown, *limits)
    with running(router):
        targets = {
            "penstock-router": [router.address],
            "penstock-shard": [f"127.0.0.1:{port}" for port in ports],
        }
        prometheus = Prometheus(folder / "prometheus", targets)
        try:
            wait_until(prometheus.scrapes_all, timeout_s=_START_S, what="all targets are up")
            start_s = time.time()
            put_under_load(router, shards)
            # What came last is scraped too.
            time.sleep(2 * SCRAPE_S)
            yield Watched(router, shards, ports, prometheus, start_s, time.time())
        finally:
            prometheus.close()


# ---- the load: all that a dashboard shows, failures included -----------------------------------


def complete(router: Router, headers: dict[str, str] | None = None, **fields: object) -> int:
    """The status of a completion, read to its end."""
    body = {"prompt": "a prompt of some length " * 4, "max_tokens": 40} | fields
    return router.ask("/v1/completions", body, headers)[0]


def ask_and_leave(router: Router) -> None:
    """Read the beginning of a stream, and go."""
    host, port = router.address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    body = json.dumps({"prompt": "x", "max_tokens": 800, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    connection.getresponse().read(200)
    connection.close()


@contextmanager
def repeated(*works: Callable[[], object]) -> Iterator[None]:
    """Repeat each of `works` in its own thread until the scope ends."""
    stopped = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        while not stopped.is_set():
            work()

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def put_under_load(router: Router, shards: list[Shard]) -> None:
    def leave() -> None:
        ask_and_leave(router)
        time.sleep(0.2)

    def ask_too_much() -> None:
        complete(router, n=12, max_tokens=100, ignore_eos=True)
        complete(router, headers={"x-penstock-timeout-s": "0.1"}, max_tokens=800)
        complete(router, prompt="")
        time.sleep(0.1)

    streams = [lambda: complete(router, stream=True)] * 4
    with repeated(*streams, leave, ask_too_much, ask_too_much):
        gaps, felt = 0.0, 0
        # Twice somebody runs in it, and goes on at the other shard: a rate is of two counts.
        while felt < 2:
            time.sleep(1)
            lose_engine(shards[0])
            now = total(router.url + "/metrics", "penstock_router_failover_gap_seconds_count")
            gaps, felt = now, felt + (now > gaps)
        # A busy machine misses some of the scrapes.
        time.sleep(3)


def lose_engine(shard: Shard) -> None:
    lost = shard.engine
    lost.kill()

    def has_another() -> bool:
        return all(each.pid != lost.pid for each in shard.children) and shard.healthy()

    wait_until(has_another, timeout_s=_START_S, what="another engine serves")


# ---- what it shows -----------------------------------------------------------------------------


def dashboard_queries() -> list[tuple[str, str]]:
    paths = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
    return [
        (f"{path.stem}: {panel['title']} {target['refId']}", target["expr"])
        for path in paths
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.mark.timeout(180)
def test_every_query_of_the_dashboards_returns_data_under_load(watched: Watched) -> None:
    span = (watched.start_s, watched.end_s)
    empty = [
        place for place, query in dashboard_queries() if not watched.prometheus.values(query, *span)
    ]
    assert empty == []


@pytest.mark.parametrize(
    "query",
    [
        # A client left, a request was refused, one was late, one was wrong.
        'rate(penstock_router_wasted_tokens_total{cause="disconnect"}[3s])',
        "rate(penstock_router_refused_total[3s])",
        'penstock_router_requests_total{outcome="timeout",status="504"}',
        'penstock_router_requests_total{outcome="refused",status="400"}',
        # An engine died, and somebody went on elsewhere.
        "penstock_shard_engine_restarts_total",
        'penstock_router_fleet_events_total{event="continued"}',
        "penstock_router_failover_gap_seconds_count",
        # What other servers' dashboards and scalers read.
        "rate(vllm:generation_tokens_total[3s])",
        'rate(vllm:request_success_total{finished_reason="abort"}[3s])',
        "vllm:kv_cache_usage_perc",
        "rate(tgi_request_count[3s])",
    ],
)
def test_what_happened_under_load_is_counted(watched: Watched, query: str) -> None:
    assert max(watched.prometheus.values(query, watched.start_s, watched.end_s), default=0) > 0


def test_what_is_exposed_is_what_pages_dashboards_and_alerts_are_checked_against(
    watched: Watched,
) -> None:
    """The families that `contract.metrics_page` knows, each with the labels that it has there."""
    urls = [watched.router.url, f"http://127.0.0.1:{watched.metrics_ports[0]}"]
    for url, families in zip(urls, (router_families(), shard_families()), strict=True):
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            exposed = [*text_string_to_metric_families(answer.read().decode())]
        ours = [family for family in exposed if family.name.startswith("penstock_")]
        known = {family.name: family for family in families}
        names = {each.name + "_total" * (each.type == "counter") for each in ours}
        assert names == set(known)
        for sample in (sample for family in ours for sample in family.samples):
            owner = next(each for each in known.values() if sample.name in each.series)
            assert set(sample.labels) - {"le"} == set(owner.labels), sample.name


def test_every_alert_is_understood_and_none_is_broken(watched: Watched) -> None:
    (group,) = watched.prometheus.get("rules")["groups"]
    assert len(group["rules"]) >= 6
    assert {rule["health"] for rule in group["rules"]} == {"ok"}


def test_the_health_check_of_compose_tells_whether_it_answers(watched: Watched) -> None:
    service = read_compose(DEPLOY / "compose.yaml", {}, "monitoring")["prometheus"]
    _, name, *arguments = service["healthcheck"]["test"]
    for url, status in ((watched.prometheus.url, 0), (f"http://127.0.0.1:{free_port()}", 1)):
        command = [word.replace("http://127.0.0.1:9090", url) for word in arguments]
        asked = [program(name), *command]
        assert (
            subprocess.run(asked, capture_output=True, timeout=30, check=False).returncode == status
        )


def test_the_alert_rules_and_the_configuration_are_valid() -> None:
    for what, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        command = [program("promtool"), "check", what, str(DEPLOY / "prometheus" / name)]
        checked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_examples_of_the_configuration_are_valid_too(tmp_path: Path) -> None:
    """An Alertmanager, and a router with HTTPS: lines to be taken out of their comments."""
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    examples = re.compile(
        r"^( *)# (?=alerting:|  alertm|    - static|        - tar|scheme:|tls_)", re.M
    )
    written, count = examples.subn(r"\1", text)
    assert count == 6
    (tmp_path / "ca.crt").write_text("")
    written = written.replace("/etc/prometheus", str(tmp_path))
    (tmp_path / "prometheus.yml").write_text(written)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
    command = [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    config = yaml.safe_load(written)
    assert config["alerting"]["alertmanagers"]
    assert config["scrape_configs"][0]["scheme"] == "https"


def test_router_and_shards_agree_on_how_many_tokens_there_were(watched: Watched) -> None:
    url = watched.router.url + "/metrics"
    wait_until(
        lambda: not total(url, "penstock_router_sequences_in_flight"),
        timeout_s=20,
        what="nothing runs",
    )
    taken = total(url, "penstock_router_output_tokens_total")
    given = sum(
        total(f"http://127.0.0.1:{port}/metrics", "penstock_shard_output_tokens_total")
        for port in watched.metrics_ports
    )
    # Tokens on their way to somebody who had left were given and never came: a tenth of all, and
    # most where the machine is busy.
    assert 0.2 * given <= taken <= given


def total(url: str, name: str) -> float:
    with urllib.request.urlopen(url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))


# ---- alerts ------------------------------------------------------------------------------------

# An hour of samples a minute apart: for each alert one with its reason, and one where all is well.
BUSY = 'penstock_router_requests_total{outcome="stop",model="m"}'
FAILING = 'penstock_router_requests_total{outcome="error",model="m"}'
SERVING = 'penstock_router_model_shards_serving{model="m"}'
SHARD = 'penstock_router_shard_state{shard="s:1",model="m",state="serving"}'
DAY_S = 86400
OF_A_ROUTER = 'penstock_router_certificate_expires_timestamp_seconds{flag="--tls-cert-file"}'
OF_A_SHARD = (
    'penstock_shard_certificate_expires_timestamp_seconds{instance="s",flag="--tls-cert-file"}'
)
FOUND_DIFFERENT = 'penstock_router_fleet_events_total{event="verified",reason="different"}'
OTHER = 'penstock_router_model_shards_serving{model="other"}'


def again(*samples: object) -> str:
    """Return these samples, repeated for an hour, one a minute."""
    return " ".join(map(str, samples * (60 // len(samples) + 1)))


def state_of(shard: str, state: str) -> str:
    return f'penstock_router_shard_state{{shard="{shard}",model="m",state="{state}"}}'


def lost_now_and_then(shard: str, lost: str = "gone") -> dict[str, str]:
    """A minute of ten."""
    is_there, is_away = (1,) * 9, ("stale",) * 9
    return {
        state_of(shard, "serving"): again(*is_there, "stale"),
        state_of(shard, lost): again(*is_away, 1),
    }


TROUBLE: dict[str, dict[str, str]] = {
    "PenstockModelDown": {OTHER: "0x60"},
    # As the only shard that dies every few minutes, at which most requests fail.
    "PenstockModelFlaps": {
        OTHER: again(1, 1, 0),
        'penstock_router_requests_total{outcome="stop",model="other"}': "0+40x60",
        'penstock_router_requests_total{outcome="error",model="other"}': "0+50x60",
    },
    # No model is known: of those there is no series.
    "PenstockNoShardServes": {
        "penstock_router_shards_serving": "0x60",
        SERVING: "_x60",
        SHARD: "_x60",
    },
    "PenstockRouterGone": {"penstock_router_shards_serving": "_x60"},
    "PenstockErrors": {FAILING: "0+10x60"},
    "PenstockStoreFails": {"penstock_router_store_failures_total": "0+20x60"},
    "PenstockAuditGaps": {"penstock_router_audit_dropped_total": "0x40 1+1x20"},
    "PenstockWrongTokens": {FOUND_DIFFERENT: "0x45 1x15"},
    "PenstockFirstTokenLate": {
        'penstock_router_first_token_seconds_bucket{le="8"}': "0+10x60",
        'penstock_router_first_token_seconds_bucket{le="60"}': "0+12x60",
        'penstock_router_first_token_seconds_bucket{le="+Inf"}': "0+12x60",
    },
    "PenstockKvCacheFull": {
        'penstock_router_shard_kv_used_ratio{shard="a",model="m"}': "0.97x60",
        'penstock_router_shard_kv_used_ratio{shard="b",model="m"}': "0.99x60",
    },
    "PenstockQueueGrows": {
        "penstock_router_sequences_queued": "0x60",
        "penstock_router_shard_waiting": "0+5x60",
    },
    "PenstockRouterLate": {"penstock_router_loop_lag_worst_seconds": "0.7x60"},
    "PenstockShardNotServing": {
        'penstock_router_shard_state{shard="t:1",model="",state="gone"}': "1x60",
        # It is scraped no more either.
        'up{job="penstock-shard",instance="t:2"}': "0x60",
    },
    "PenstockShardFlaps": lost_now_and_then("t:1"),
    "PenstockShardNotScraped": {'up{job="penstock-shard",instance="t:2"}': "0x60"},
    "PenstockEngineDied": {"penstock_shard_engine_restarts_total": "0+1x60"},
    # Times of these tests begin at 0.
    "PenstockCertificateExpiring": {OF_A_SHARD: f"{13 * DAY_S}x60"},
    "PenstockCertificateExpired": {OF_A_ROUTER: f"{DAY_S // 2}x60"},
    "PenstockKeysRefused": {"penstock_router_keys_refused_reloads_total": "0+60x60"},
    "PenstockKvBlocksRefused": {"penstock_shard_kv_refused_blocks_total": "0x45 1x15"},
    "PenstockKvDiskFails": {
        "penstock_shard_kv_disk_dropped_blocks_total": "0+5x60",
        "penstock_shard_kv_disk_saved_blocks_total": "70x60",
    },
}
WELL = {
    "penstock_router_shards_serving": "2x60",
    SERVING: "2x60",
    SHARD: "1x60",
    'up{job="penstock-shard",instance="s:2"}': "1x60",
    # Another program of that machine.
    'up{job="node",instance="s:9100"}': "0x60",
    BUSY: "0+90x60",
    'penstock_router_requests_total{outcome="refused",model="m"}': "0+50x60",
    FAILING: "0+1x60",
    'penstock_router_first_token_seconds_bucket{le="8"}': "0+12x60",
    'penstock_router_first_token_seconds_bucket{le="+Inf"}': "0+12x60",
    'penstock_router_shard_kv_used_ratio{shard="a",model="m"}': "0.5x60",
    'penstock_router_shard_kv_used_ratio{shard="b",model="m"}': "1x60",
    "penstock_router_sequences_queued": "3x60",
    # Much waits, and less and less.
    "penstock_router_shard_waiting": "300-2x60",
    "penstock_shard_engine_restarts_total": "0x45 1x15",
    "penstock_router_loop_lag_worst_seconds": "0.02x60",
    # Once, and it went on.
    "penstock_router_store_failures_total": "0x45 1x15",
    "penstock_router_audit_dropped_total": "0x60",
    FOUND_DIFFERENT: "0x60",
    "penstock_shard_kv_refused_blocks_total": "0x60",
    OF_A_ROUTER: f"{80 * DAY_S}x60",
    OF_A_SHARD: f"{15 * DAY_S}x60",
    # Half written for a moment.
    "penstock_router_keys_refused_reloads_total": "0x30 3x30",
    # A disk that does not take all that comes, but most of it.
    "penstock_shard_kv_disk_dropped_blocks_total": "0+5x60",
    "penstock_shard_kv_disk_saved_blocks_total": "0+70x60",
}


def test_each_alert_fires_for_its_reason_and_only_for_it(tmp_path: Path) -> None:
    assert {rule["alert"] for rule in alert_rules()} == set(TROUBLE)
    cases = [case({**WELL, **series}, {name: 1}) for name, series in TROUBLE.items()]
    check_rules(tmp_path, [*cases, case(WELL, {})])


def test_what_a_model_that_is_down_brings_about_fires_nothing_else(tmp_path: Path) -> None:
    """Requests for it fail, and the other model goes on. Then all are down, each with its name."""
    down = {
        'penstock_router_model_shards_serving{model="other"}': "0x60",
        'penstock_router_requests_total{outcome="error",model="other"}': "0+80x60",
    }
    all_down = {"penstock_router_shards_serving": "0x60", SERVING: "0x60", FAILING: "0+90x60"}
    cases = [
        case({**WELL, **down}, {"PenstockModelDown": 1}),
        case({**WELL, **down, **all_down}, {"PenstockModelDown": 2}),
    ]
    check_rules(tmp_path, cases)


def test_an_alert_of_a_model_names_it_also_if_most_requests_are_for_others(tmp_path: Path) -> None:
    """Of all requests about 1 in 100 fails; of the requests for this model, half fail."""
    few = {
        'penstock_router_requests_total{outcome="stop",model="few"}': "0+1x60",
        'penstock_router_requests_total{outcome="error",model="few"}': "0+1x60",
        'penstock_router_model_shards_serving{model="few"}': "1x60",
    }
    check_rules(tmp_path, [case({**WELL, **few}, {"PenstockErrors": 1}, 'model="few"')])


def alert_rules() -> list[dict[str, Any]]:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    assert isinstance(rules, list)
    return rules


def check_rules(folder: Path, cases: list[dict[str, Any]]) -> None:
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
    (folder / "cases.yml").write_text(
        yaml.safe_dump({"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": cases})
    )
    command = [program("promtool"), "test", "rules", str(folder / "cases.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, (checked.stdout + checked.stderr)[-3000:]


def case(
    series: dict[str, str],
    firing: dict[str, int],
    labels: str = "",
    *,
    every: str = "1m",
    at: str = "50m",
) -> dict[str, Any]:
    """Return a test of the rules: at the time `at`, exactly the alerts in `firing` fire, in these
    numbers. The alerts are only counted, because their texts are for people.
    """
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    query = f'count by (alertname) (ALERTS{{alertstate="firing",{labels}}})'
    samples = [
        {"labels": f'{{alertname="{name}"}}', "value": count} for name, count in firing.items()
    ]
    test = {"expr": query, "eval_time": at, "exp_samples": samples}
    return {"interval": every, "input_series": inputs, "promql_expr_test": [test]}


class Broken:
    """Two models, a shard each, with a router."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {model: free_port() for model in ("one", "two")}
        self.metrics_ports = {model: free_port() for model in self.ports}
        self.shards = {model: self.start(model) for model in self.ports}
        addresses = [shard.address for shard in self.shards.values()]
        keeping = ("--response-store", str(folder / "store"), "--audit-log", str(folder / "audit"))
        patience = ("--failover-timeout-s", "1")
        self.router = Router(folder / "router", addresses, *patience, *keeping)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """No file of the router can become longer."""
        pid, limit = self.router.process.pid, resource.RLIMIT_FSIZE
        before = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, (0, before[1]))
        yield
        resource.prlimit(pid, limit, before)

    def start(self, model: str) -> Shard:
        flags = ("--step-ms", "2", "--served-model-name", model)
        metrics = ("--metrics-port", str(self.metrics_ports[model]))
        return Shard(self.folder / f"shard-{model}", *flags, *metrics, port=self.ports[model])

    def ask_all(self) -> None:
        for model in self.ports:
            complete(self.router, model=model, max_tokens=4)
        self.router.ask("/v1/responses", {"model": "one", "input": "x", "max_output_tokens": 4})
        time.sleep(0.05)

    def lose(self, *models: str) -> None:
        for model in models:
            self.shards[model].close()

    def bring_back(self, *models: str) -> None:
        for model in models:
            self.shards[model] = self.start(model)
        for model in models:
            self.shards[model].wait_healthy()


def hurried(rules: str) -> str:
    """Alerts with half a second for each minute."""
    rules = re.sub(r":(\d+)s\]", lambda found: f":{int(found[1]) * 500 // 60}ms]", rules)
    times = re.compile(r"(?<=[\[ ])(\d+)m(?=[\]:\n])")
    return times.sub(lambda found: f"{500 * int(found[1])}ms", rules)


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[tuple[Broken, Prometheus]]:
    program("prometheus")
    fleet = Broken(tmp_path)
    with running(fleet.router, *fleet.shards.values()):
        targets = {
            "penstock-router": [fleet.router.address],
            "penstock-shard": [f"127.0.0.1:{port}" for port in fleet.metrics_ports.values()],
        }
        rules = hurried((DEPLOY / "prometheus" / "alerts.yml").read_text())
        prometheus = Prometheus(tmp_path / "prometheus", targets, rules)
        try:
            wait_until(prometheus.scrapes_all, timeout_s=_START_S, what="all targets are up")
            yield fleet, prometheus
        finally:
            prometheus.close()
            fleet.lose(*fleet.shards)


@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
def test_a_real_prometheus_names_each_fault_and_nothing_else_and_takes_it_back(
    broken: tuple[Broken, Prometheus],
) -> None:
    fleet, prometheus = broken

    def wait_for(what: str, *firing: tuple[str, str]) -> None:
        wait_until(lambda: prometheus.firing() == set(firing), timeout_s=30, what=what)

    def stays(*firing: tuple[str, str]) -> None:
        """Assert that for 4 s no other alert fires; nearly all alerts fire within that time. Then
        wait for these: on a busy machine a missed scrape takes an alert back for a moment.
        """
        until_s = time.monotonic() + 4
        while time.monotonic() < until_s:
            assert prometheus.firing() <= set(firing)
            time.sleep(SCRAPE_S)
        wait_for(f"still {firing}", *firing)

    with repeated(fleet.ask_all):
        wait_for("the router is scraped")
        stays()
        fleet.lose("two")
        wait_for("two is down", ("PenstockModelDown", "two"))
        # Its requests fail meanwhile, which is no second alert; and one is served.
        stays(("PenstockModelDown", "two"))
        gone = ("PenstockShardNotServing", fleet.shards["two"].address)
        wait_for("and its shard for long", ("PenstockModelDown", "two"), gone)
        fleet.bring_back("two")
        wait_for("two is back")
        # Failures of before are no errors of a model that is served.
        stays()
        fleet.lose("one", "two")
        wait_for("all are down", ("PenstockModelDown", "one"), ("PenstockModelDown", "two"))
        fleet.bring_back("one", "two")
        wait_for("all are back")
        with fleet.full_disk():
            here = fleet.router.address
            full = ("PenstockStoreFails", here), ("PenstockAuditGaps", here)
            wait_for("a disk is full", *full)
        wait_for("it has room again")
    fleet.router.close()
    wait_for("the router is gone", ("PenstockRouterGone", ""))


# ---- a port that is taken ----------------------------------------------------------------------


def test_a_metrics_port_in_use_is_a_line_and_an_exit_status(
    metered: dict[int, Shard], tmp_path: Path
) -> None:
    port, first = next(iter(metered.items()))
    second = Shard(tmp_path / "second", "--metrics-port", str(port))
    try:
        assert second.process.wait(30) == 2
    finally:
        second.close()
    (line,) = second.log.splitlines()
    assert line.startswith(
        f"penstock shard: cannot listen on 127.0.0.1:{port}: Address already in use"
    )
    assert line.endswith("; choose another --metrics-port")
    if sys.platform == "linux":
        assert f"(process {first.process.pid})" in line
