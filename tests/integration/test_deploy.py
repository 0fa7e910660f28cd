"""The compose file and the chart do what they say, without an engine or a cluster.

Each service's command, environment, ports and probes are taken from the compose file or the
rendered chart, its entry point from the Dockerfile, and run as local processes.
`test_container_images.py` builds the images.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from integration.containers import ANY_CERTIFICATE, Container, Network, Workload
from integration.images import Image, image, port_of, stages
from integration.manifests import (
    chart_workloads,
    compose_workloads,
    read_compose,
    render,
    seconds,
)
from support.certificates import Authority
from support.processes import wait_until

from penstock_common import key_file_format
from penstock_shard.cli import parse_config as parse_shard_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FAKE = ("--runner", "fake", "--step-ms", "2")
KEY = "a key of the test"


def images() -> dict[str, Image]:
    """Return both images, by the names that the compose file and the chart use."""
    router, shard = image("router"), image("shard-cpu")
    return {
        "penstock-router:local": router,
        "penstock-shard:local-cpu": shard,
        f"penstock-router:{app_version()}": router,
        f"penstock-shard:{app_version()}-cpu": shard,
    }


def app_version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version: str = project["version"]
    return version


# ---- the compose file ------------------------------------------------------------------------


def test_the_compose_services_answer_and_their_health_checks_flip_on_kill(tmp_path: Path) -> None:
    variables = {"PENSTOCK_SHARD_ARGS": " ".join(FAKE)}
    services = read_compose(DEPLOY / "compose.yaml", variables, "cpu")
    with running(compose_workloads(services, images()), tmp_path) as containers:
        router, first, second = (containers[name] for name in ("router", "shard-0", "shard-1"))
        check_answers(router)

        first.kill()
        assert not first.probe("health")
        check_answers(router)
        assert router.probe("health")

        second.kill()
        assert not second.probe("health")
        wait_until(lambda: router.status("/health") == 503, timeout_s=60, what="it is not ready")
        becomes(router, "health", False)
        assert (router.status("/health"), router.status("/live")) == (503, 200)

        # As `restart: unless-stopped` does.
        first.restart()
        becomes(first, "health", True)
        wait_until(lambda: router.status("/health") == 200, timeout_s=60, what="it is ready again")
        becomes(router, "health", True)
        check_answers(router)
        assert (router.stop(), first.stop()) == (0, 0)


def test_a_compose_router_has_keys_a_store_and_an_audit_log_as_its_document_says(
    tmp_path: Path,
) -> None:
    """The settings are the lines that the document adds to the file of settings."""
    document = (DEPLOY / "README.md").read_text()
    lines = re.findall(r"^(PENSTOCK_\w+)=(.*)$", document, re.MULTILINE)
    told = dict(lines) | {"PENSTOCK_SHARD_API_KEY": "a key of shards"}
    # HTTPS is a later step of the document.
    assert told.pop("PENSTOCK_ROUTER_URL").startswith("https:")
    del told["PENSTOCK_CA_FILE"]
    services = read_compose(
        DEPLOY / "compose.yaml", {**told, "PENSTOCK_SHARD_ARGS": " ".join(FAKE)}, "cpu"
    )
    del services["shard-1"]
    (state,) = services["router"]["volumes"]
    digest = key_file_format.digest_of(KEY.encode())
    entry = key_file_format.KeyEntry(name="operator", digest=digest, scopes=("admin",))
    file = told["PENSTOCK_API_KEYS_FILE"]
    assert file.startswith(state.partition(":")[2])
    workloads = [
        dataclasses.replace(each, files={file: key_file_format.add_entry("", entry)})
        if each.host == "router"
        else each
        for each in compose_workloads(services, images())
    ]
    with running(workloads, tmp_path) as containers:
        router, shard = containers["router"], containers["shard-0"]
        check_answers(router, KEY)
        assert router.status("/v1/models") == 401
        body = {"model": "penstock-toy", "input": "x", "max_output_tokens": 4}
        stored = ask(router, "/v1/responses", body, KEY)
        assert stored["store"] is True
        assert ask(router, f"/v1/responses/{stored['id']}", None, KEY)["id"] == stored["id"]
        (listed, *_) = ask(router, "/admin/shards", None, KEY)["shards"]
        assert listed["state"] == "serving"
        # A command without the shards' key is refused by a shard.
        info = ("penstock", "info", "shard-0:50051")
        assert router.execute(*info).returncode == 0
        refused = router.execute(*info, without="PENSTOCK_SHARD_API_KEY")
        assert "missing or wrong API key" in refused.stderr
        assert (router.stop(), shard.stop()) == (0, 0)
        written = tmp_path / "router" / "var" / "lib" / "penstock"
        assert {"responses.db", "audit.log"} <= {path.name for path in written.iterdir()}


PROFILES = ("cpu", "gpu", "vllm", "monitoring")


def test_every_compose_service_is_built_from_a_target_that_exists() -> None:
    for service in read_compose(DEPLOY / "compose.yaml", {}, "cpu", "gpu", "vllm").values():
        recipe = service["build"]
        context = (DEPLOY / recipe["context"]).resolve()
        assert context == ROOT
        assert (context / recipe["dockerfile"]).samefile(DEPLOY / "Dockerfile")
        assert recipe["target"] in stages()
        declared = re.findall(r"^ARG (\w+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
        assert set(recipe.get("args", {})) <= set(declared)


def test_compose_containers_may_do_little_and_get_time_to_stop() -> None:
    for service in read_compose(DEPLOY / "compose.yaml", {}, *PROFILES).values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["pids_limit"] == 4096
        # Router and shard let requests run for 30 s after SIGTERM.
        assert seconds(service["stop_grace_period"]) > 30


def test_memory_processors_and_tags_of_compose_are_what_its_variables_say() -> None:
    def told(**variables: str) -> dict[str, tuple[str, str, str]]:
        services = read_compose(DEPLOY / "compose.yaml", variables, "cpu")
        return {
            name: (each["image"].partition(":")[2], each["mem_limit"], each["cpus"])
            for name, each in services.items()
        }

    shard = ("local-cpu", "16g", "0")
    assert told() == {"router": ("local", "4g", "0"), "shard-0": shard, "shard-1": shard}
    of_shards = {"PENSTOCK_SHARD_MEMORY": "24g", "PENSTOCK_SHARD_CPUS": "1.5"}
    of_router = {"PENSTOCK_ROUTER_MEMORY": "2g", "PENSTOCK_ROUTER_CPUS": "2"}
    shard = ("0.2.0-cpu", "24g", "1.5")
    assert told(PENSTOCK_VERSION="0.2.0", **of_shards, **of_router) == {
        "router": ("0.2.0", "2g", "2"),
        "shard-0": shard,
        "shard-1": shard,
    }


@pytest.mark.parametrize("profile", ["cpu", "gpu", "gpu-split", "vllm"])
def test_each_shard_of_compose_takes_flags_of_its_own_after_those_of_all(profile: str) -> None:
    variables = {
        "PENSTOCK_SHARD_ARGS": "--of-all",
        "PENSTOCK_SHARD_0_ARGS": "--of-0",
        "PENSTOCK_SHARD_1_ARGS": "--of-1",
    }
    services = read_compose(DEPLOY / "compose.yaml", variables, profile)
    for name in shard_names(services):
        (service,) = (each for each in services if reached_by(services, each) == name)
        number = name.removeprefix("shard-")
        assert services[service]["command"].endswith(f" --of-all --of-{number}")


def test_the_settings_of_compose_stand_in_its_document_and_in_its_head() -> None:
    """Build arguments that compose.yaml passes on only if set are left out: the document has a
    section on such builds.
    """
    file = (DEPLOY / "compose.yaml").read_text()
    head, _, body = file.partition("\nname:")
    document = (DEPLOY / "README.md").read_text()
    settings = set(re.findall(r"\$\{(\w+)|^ +(PENSTOCK_\w+):$", body, re.MULTILINE))
    settings = {name for pair in settings for name in pair if name}
    assert len(settings) >= 18
    assert {
        name for name in settings if f"#   {name}" not in head and f", {name}" not in head
    } == set()
    assert {name for name in settings if f"`{name}" not in document} == set()


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_the_compose_routers_shards_are_services_of_each_profile(profile: str) -> None:
    services = read_compose(DEPLOY / "compose.yaml", {}, profile)
    addresses = services["router"]["command"].split()[1].split(",")
    target = "shard-cpu" if profile == "cpu" else "shard-cuda"
    assert addresses == [f"{name}:{port_of(target)}" for name in shard_names(services)]
    assert set(services) - {"router"} <= set(services["router"]["depends_on"])


def shard_names(services: Mapping[str, Any]) -> list[str]:
    """Return the names by which the router reaches the shards."""
    return [reached_by(services, name) for name in services if name != "router"]


def reached_by(services: Mapping[str, Any], name: str) -> str:
    networks = services[name].get("networks", {"default": {"aliases": [name]}})
    alias: str = networks["default"]["aliases"][0]
    return alias


def test_each_shard_of_the_gpu_profile_has_a_gpu_of_its_own() -> None:
    cpu = read_compose(DEPLOY / "compose.yaml", {}, "cpu")
    shards = read_compose(DEPLOY / "compose.yaml", {}, "gpu")
    del shards["router"]
    gpus = []
    for shard in shards.values():
        # An index of CPU builds must not get into this image.
        assert shard["build"]["target"] == "shard-cuda"
        assert "TORCH_INDEX_URL" not in shard["build"]["args"]
        # What is not set is what the Dockerfile says.
        assert set(shard["build"]["args"].values()) == {None}
        assert shard["image"] not in {service["image"] for service in cpu.values()}
        (device,) = shard["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
    assert len(gpus) == len(set(gpus)) == len(shards)


def vllm_service(**variables: str) -> Mapping[str, Any]:
    """The shard of the profile whose engine is vLLM's."""
    services = read_compose(DEPLOY / "compose.yaml", variables, "vllm")
    (name,) = services.keys() - {"router"}
    assert name in services["router"]["depends_on"]
    # One of those that the router asks, and that Prometheus scrapes.
    assert reached_by(services, name) == services[name]["hostname"] == "shard-0"
    service: Mapping[str, Any] = services[name]
    return service


def test_the_vllm_profile_runs_its_image_on_a_gpu_with_flags_that_its_shard_takes() -> None:
    service = vllm_service(
        PENSTOCK_SHARD_ARGS="--model org/model --engine-arg seed=1", PENSTOCK_VERSION="0.2.0"
    )
    assert service["build"]["target"] == "shard-vllm"
    # What is not set is what the Dockerfile says; an index of torch is nothing to this image.
    assert service["build"]["args"] == {"VLLM_IMAGE": None}
    assert service["image"] == "penstock-shard:0.2.0-vllm"
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["device_ids"], device["capabilities"]) == (["0"], ["gpu"])
    words = [*image("shard-vllm").entrypoint[2:], *shlex.split(service["command"])]
    config = parse_shard_config(words)
    assert (config.engine, config.model, config.engine_args) == (
        "vllm",
        "org/model",
        (("seed", "1"),),
    )
    assert service["expose"] == [str(config.metrics_port)]


def test_the_vllm_profile_has_shared_memory_and_keeps_what_is_compiled_and_may_start_late() -> None:
    service = vllm_service()
    assert service["shm_size"] == "8g"
    assert vllm_service(PENSTOCK_VLLM_SHM="2g")["shm_size"] == "2g"
    assert service["volumes"] == [f"cache:{image('shard-vllm').env['HOME']}"]
    (other, *_) = read_compose(DEPLOY / "compose.yaml", {}, "gpu-split").values()
    health, before = service["healthcheck"], other["healthcheck"]
    assert seconds(health["start_period"]) > seconds(before["start_period"])
    assert health["test"] == ["CMD", *image("shard-vllm").healthcheck]


def test_all_that_compose_publishes_is_for_this_machine_until_it_is_told_otherwise() -> None:
    told = {"PENSTOCK_HOST": "0.0.0.0", "PENSTOCK_PORT": "9000"}
    for variables, router in (({}, "127.0.0.1:8000:8000"), (told, "0.0.0.0:9000:8000")):
        services = read_compose(DEPLOY / "compose.yaml", variables, *PROFILES)
        ports = {name: service.get("ports", []) for name, service in services.items()}
        assert ports["router"] == [router]
        others = [port for name in ports if name != "router" for port in ports[name]]
        assert all(port.startswith("127.0.0.1:") for port in others)


def test_what_monitors_is_pinned_reached_from_this_machine_only_and_lets_nobody_in() -> None:
    services = read_compose(DEPLOY / "compose.yaml", {}, "monitoring")
    del services["router"]
    for service in services.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert int(service["user"].split(":")[0]) > 0
        # What is of the repository is not written to.
        assert all(v.endswith(":ro") for v in service["volumes"] if v.startswith("."))
        assert all((DEPLOY / v.split(":")[0]).is_dir() for v in service["volumes"] if v[0] == ".")
    grafana = services["grafana"]["environment"]
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not any("PASSWORD" in name for name in grafana)
    # Where it is told to look for what is mounted there.
    mounted = dict(v.removesuffix(":ro").split(":") for v in services["grafana"]["volumes"])
    assert grafana["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == (
        f"{mounted['./grafana/dashboards']}/overview.json"
    )


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_prometheus_scrapes_every_service_of_a_profile_where_it_tells(profile: str) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    scraped = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]
    }
    services = read_compose(DEPLOY / "compose.yaml", {}, profile)
    ports = {port for name, each in services.items() if name != "router" for port in each["expose"]}
    (port,) = ports
    assert all(
        f"--metrics-port {port}" in each["command"]
        for name, each in services.items()
        if name != "router"
    )
    assert scraped == {
        "penstock-router": [f"router:{port_of('router')}"],
        "penstock-shard": [f"{name}:{port}" for name in shard_names(services)],
    }


# ---- the chart -------------------------------------------------------------------------------


def test_the_charts_pods_answer_and_their_probes_flip_on_kill(tmp_path: Path) -> None:
    values = {"shard": {"extraArgs": list(FAKE)}, "apiKey": {"existingSecret": "keys"}}
    workloads = chart_workloads(render(values, "demo"), images(), {"keys": {"api-key": KEY}})
    with running(workloads, tmp_path) as containers:
        router = containers["demo-penstock-router"]
        first, second = (c for name, c in containers.items() if "toy" in name)
        check_answers(router, KEY)
        assert router.status("/v1/models") == 401
        shown = metrics_of(first.ports[9464]) + metrics_of(router.port)
        assert len(scaled_by()) == 5
        assert [name for name in scaled_by() if f"# TYPE {name} " not in shown] == []

        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(long_answer, router, number) for number in range(8)]
            wait_until(
                lambda: "penstock_shard_running 0" not in metrics_of(first.ports[9464]),
                timeout_s=10,
                what="load on the first shard",
            )
            assert first.stop() == 0, "it is told to go, and drains"
            assert [answer.result() for answer in answers] == [300] * 8
        first.restart()
        becomes(first, "startup", True)

        first.kill()
        assert not any(first.probe(name) for name in first.workload.probes)
        check_answers(router, KEY)
        assert router.probe("readiness")

        second.kill()
        becomes(router, "readiness", False)
        assert router.probe("liveness"), "a router is not restarted because its shards are gone"
        assert (router.status("/health"), router.status("/live")) == (503, 200)
        assert router.stop() == 0


def test_the_charts_pods_with_all_secrets_serve_two_models_over_tls_to_who_has_a_key(
    tmp_path: Path,
) -> None:
    values = {
        "models": [
            {"name": name, "replicas": 1, "servedNames": [name]} for name in ("first", "second")
        ],
        "shard": {"extraArgs": list(FAKE)},
        "router": {"tls": {"existingSecret": "https"}, "shardWaitSeconds": 60},
        "apiKeysFile": {"existingSecret": "keys"},
        "shardApiKey": {"existingSecret": "keys"},
        "resumeKey": {"existingSecret": "keys"},
        "shardTls": {"existingSecret": "shards", "mutual": True, "routerSecret": "router"},
    }
    workloads = chart_workloads(render(values, "demo"), images(), tls_secrets(tmp_path))
    with running(workloads, tmp_path) as containers:
        router = containers["demo-penstock-router"]
        # It is ready before it has found any: it would hold requests.
        wait_until(
            lambda: served_by(router) == ["first", "second"], timeout_s=30, what="both models"
        )
        check_answers(router, KEY)
        assert router.status("/v1/models") == 401

        shard = containers["demo-penstock-first-0.demo-penstock-first"]
        assert shard.workload.probes["liveness"].command, "the kubelet speaks no TLS over gRPC"
        shard.kill()
        assert not any(shard.probe(name) for name in different_probes(shard))
        shard.restart()
        becomes(shard, "liveness", True)
        assert (router.stop(), shard.stop()) == (0, 0)


def served_by(router: Container) -> list[str]:
    return sorted(card["id"] for card in ask(router, "/v1/models", None, KEY)["data"])


def tls_secrets(folder: Path) -> dict[str, dict[str, str]]:
    """Return the secrets that the chart uses, by name. One authority issues all certificates."""
    authority = Authority(folder, "cluster")

    def pair(name: str) -> dict[str, str]:
        made = authority.issue(name)
        files = {"tls.crt": made.cert, "tls.key": made.key, "ca.crt": authority.file}
        return {key: file.read_text() for key, file in files.items()}

    entry = key_file_format.KeyEntry(name="test", digest=key_file_format.digest_of(KEY.encode()))
    keys = {
        "keys.toml": key_file_format.add_entry("", entry),
        "shard-api-key": "another key",
        "resume-key": "one of sixteen or more",
    }
    names = {"https": "chat.example.com", "shards": "demo-penstock-shard", "router": "router"}
    return {"keys": keys, **{secret: pair(name) for secret, name in names.items()}}


def long_answer(router: Container, number: int) -> int:
    """Ask for 300 tokens, and return the number of tokens in the answer."""
    request = {"model": "penstock-toy", "prompt": f"Story {number}:", "max_tokens": 300}
    tokens: int = ask(router, "/v1/completions", request, KEY)["usage"]["completion_tokens"]
    return tokens


def metrics_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text: str = response.read().decode()
        return text


def scaled_by() -> set[str]:
    """The metrics that the chart's autoscalers ask for."""
    to_zero = {"shardWaitSeconds": 60}
    resources = [
        *render({"shard": {"autoscaling": {"kind": "hpa"}}}, "demo"),
        *render(
            {"shard": {"autoscaling": {"kind": "keda", "minReplicas": 0}}, "router": to_zero},
            "demo",
        ),
    ]
    scalers = [r for r in resources if r["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    return set(re.findall(r"penstock_(?:router|shard)_\w+", json.dumps(scalers)))


# ---- what the tests above share --------------------------------------------------------------


@contextlib.contextmanager
def running(workloads: Sequence[Workload], folder: Path) -> Iterator[dict[str, Container]]:
    """Start all workloads, wait until they are healthy, and yield the containers by host name."""
    network = Network()
    for workload in workloads:
        network.join(workload)
    containers: dict[str, Container] = {}
    try:
        for workload in workloads:
            log_file = folder / f"{workload.host}.log"
            containers[workload.host] = Container(workload, network, log_file)
        for container in containers.values():
            for probe in different_probes(container):
                becomes(container, probe, True)
        yield containers
    finally:
        for container in containers.values():
            container.kill()


def different_probes(container: Container) -> list[str]:
    """Return the name of each different probe; one name for equal probes."""
    return list({probe: name for name, probe in container.workload.probes.items()}.values())


def becomes(container: Container, probe: str, expected: bool) -> None:
    """Wait until a probe says so, or fail with the log."""

    def settled() -> bool:
        assert container.process.poll() is None, f"it ended; its log:\n{container.log[-3000:]}"
        return container.probe(probe) == expected

    if expected:
        # Some probes are processes, which would only be in the way before.
        wait_until(container.listens, timeout_s=60, what=f"{container.workload.host} listens")
    what = f"{container.workload.host}: {probe} is {expected}"
    try:
        wait_until(settled, timeout_s=60, what=what)
    except AssertionError as error:
        raise AssertionError(f"{error}; its log:\n{container.log[-3000:]}") from None


def check_answers(router: Container, key: str = "") -> None:
    """A completion and a chat request get text."""
    model = ask(router, "/v1/models", None, key)["data"][0]["id"]
    request = {"model": model, "prompt": "Once upon a time", "max_tokens": 8}
    answer = ask(router, "/v1/completions", request, key)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["text"]
    messages = [{"role": "user", "content": "What is penstock?"}]
    request = {"model": model, "messages": messages, "max_tokens": 8}
    answer = ask(router, "/v1/chat/completions", request, key)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["message"]["content"]


def ask(router: Container, path: str, body: Mapping[str, Any] | None, key: str) -> Any:
    request = urllib.request.Request(router.url + path)
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(request, data, timeout=30, context=ANY_CERTIFICATE) as response:
        return json.loads(response.read())
