"""The images, the compose file and the chart do what they say, without an engine or a cluster.

Each image's own install lines are run in a fresh environment; each service's command,
environment, ports and probes are then taken from the compose file or the rendered chart and run
as local processes. The shard's image is made with the extra `fake` in place of `shard`, which
saves the download of torch; the soak run makes it as it is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import helm_python
import pytest
from integration.containers import Built, Container, Network, Workload, build
from integration.dockerfile import Dockerfile, parse
from integration.manifests import (
    chart_workloads,
    compose_workloads,
    find,
    read_compose,
    render,
    seconds,
)
from support.processes import wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "penstock"
# A slow package index is not what is tested here.
pytestmark = pytest.mark.timeout(600)

FAKE = ("--runner", "fake", "--step-ms", "2")
KEY = "a key of the test"

TARGETS = [("router", "router"), ("shard", "cpu"), ("shard", "cuda")]


def dockerfile(name: str) -> Dockerfile:
    return parse((DEPLOY / f"Dockerfile.{name}").read_text())


def build_image(name: str, target: str, root: Path, *, with_torch: bool = False) -> Built:
    def edit_run(command: str) -> str | None:
        if command.startswith("apt-get"):
            # This machine has a compiler.
            return None
        if with_torch or name == "router":
            return command
        return None if '"$TORCH"' in command else command.replace("'.[shard]'", "'.[fake]'")

    ignore = (DEPLOY / f"Dockerfile.{name}.dockerignore").read_text()
    return build(
        dockerfile(name), target, context=ROOT, ignore=ignore, root=root, edit_run=edit_run
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Built]]:
    """Both images, by the names that the compose file and the chart use."""
    roots = {name: tmp_path_factory.mktemp(name) for name in ("router", "shard")}
    with ThreadPoolExecutor() as pool:
        router = pool.submit(build_image, "router", "router", roots["router"])
        shard = pool.submit(build_image, "shard", "cpu", roots["shard"])
        built_router, built_shard = router.result(), shard.result()
    yield {
        "penstock-router": built_router,
        "penstock-shard:cpu": built_shard,
        f"penstock-router:{app_version()}": built_router,
        f"penstock-shard:{app_version()}-cpu": built_shard,
    }
    # pytest would keep some hundred MB of each of the last runs.
    for root in roots.values():
        shutil.rmtree(root)


def app_version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version: str = project["version"]
    return version


# ---- the images ------------------------------------------------------------------------------


def test_the_routers_environment_has_no_torch_and_no_shard(images: Mapping[str, Built]) -> None:
    installed = images["penstock-router"].site_packages
    assert {"penstock_router", "penstock_client", "penstock_proto", "tokenizers"} <= installed
    assert not {"torch", "transformers", "numpy", "penstock_shard"} & installed


def test_the_shards_environment_has_no_router(images: Mapping[str, Built]) -> None:
    installed = images["penstock-shard:cpu"].site_packages
    assert {"penstock_shard", "penstock_client", "penstock_proto", "grpc"} <= installed
    assert not {"penstock_router", "aiohttp", "prometheus_client"} & installed


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_an_image_runs_as_nobody_and_answers_probes(name: str, target: str) -> None:
    image = dockerfile(name).image(target, "/bin")
    user, _, group = image.user.partition(":")
    assert int(user) >= 10_000, "a number, so that runAsNonRoot can be checked"
    assert user == group
    assert image.healthcheck[:2] == ("penstock", "health")
    assert image.healthcheck[-1].endswith(f"127.0.0.1:{image.ports[0]}")
    assert image.entrypoint == (
        "penstock",
        name,
        "--host",
        "0.0.0.0",
        "--port",
        str(image.ports[0]),
    )


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_an_image_takes_the_environment_from_its_build_and_nothing_else(
    name: str, target: str
) -> None:
    (copy,) = dockerfile(name).copies(target)
    assert (copy.sources, copy.destination) == (("/opt/penstock",), "/opt/penstock")
    assert copy.stage is not None
    assert copy.stage.endswith("build")


def test_the_cpu_image_has_kernels_and_needs_no_compiler(images: Mapping[str, Built]) -> None:
    image = images["penstock-shard:cpu"]
    kernels = Path(image.env["PENSTOCK_CACHE"])
    # The user of the image is not the one who made it.
    assert {path.stat().st_mode & 0o777 for path in (kernels, *kernels.iterdir())} == {0o755}
    code = """if True:
        from penstock_shard.models.kernels.build import libraries, supported_levels
        print(*(next(libraries(level, print)) for level in supported_levels()))
    """
    found = subprocess.run(
        [image.root / "opt" / "penstock" / "bin" / "python", "-c", code],
        env={"PENSTOCK_CACHE": str(kernels), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert set(found) <= {str(path) for path in kernels.iterdir()}
    assert len(found) >= 1


def test_the_cuda_image_installs_the_flash_extra_and_the_cpu_image_does_not() -> None:
    file = dockerfile("shard")
    runs = {
        stage: [step.text for step in file.steps(stage) if step.keyword == "RUN"]
        for stage in ("cuda-build", "cpu-build")
    }
    assert runs["cuda-build"][-1] == "pip install --find-links /wheels '.[flash]'"
    assert "pip install '.[shard]'" in runs["cpu-build"]
    # The same torch, before the rest.
    (torch,) = (run for run in runs["cpu-build"] if '"$TORCH"' in run)
    assert runs["cuda-build"][1] == torch
    assert runs["cpu-build"].index(torch) < runs["cpu-build"].index("pip install '.[shard]'")


def test_what_an_image_copies_is_not_kept_out_of_its_context() -> None:
    for name in ("router", "shard"):
        lines = (DEPLOY / f"Dockerfile.{name}.dockerignore").read_text().splitlines()
        allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
        file = dockerfile(name)
        copied = {
            source
            for target in file.targets
            for copy in file.copies(target)
            if copy.stage is None
            for source in copy.sources
        }
        assert copied == allowed


@pytest.mark.soak
@pytest.mark.skipif(not os.environ.get("PENSTOCK_SOAK"), reason="downloads torch: make soak")
@pytest.mark.timeout(1800)
def test_the_cpu_image_as_it_is_written_serves_the_builtin_model(
    images: Mapping[str, Built], tmp_path: Path
) -> None:
    shard = build_image("shard", "cpu", tmp_path, with_torch=True)
    assert {"torch", "transformers"} <= shard.site_packages
    services = read_compose(DEPLOY / "compose.yaml", {})
    workloads = compose_workloads(services, {**images, "penstock-shard:cpu": shard})
    with running(workloads, tmp_path) as containers:
        check_answers(containers["router"])
    shutil.rmtree(tmp_path / "opt")


# ---- the compose file ------------------------------------------------------------------------


def test_the_compose_services_answer_and_their_health_checks_flip_on_kill(
    images: Mapping[str, Built], tmp_path: Path
) -> None:
    services = read_compose(DEPLOY / "compose.yaml", {"PENSTOCK_SHARD_ARGS": " ".join(FAKE)})
    with running(compose_workloads(services, images), tmp_path) as containers:
        router, first, second = (containers[name] for name in ("router", "shard-0", "shard-1"))
        check_answers(router)

        first.kill()
        assert not first.probe("health")
        check_answers(router)
        assert router.probe("health")

        second.kill()
        assert not second.probe("health")
        becomes(router, "health", False)
        assert (router.status("/ready"), router.status("/health")) == (503, 200)

        # As `restart: unless-stopped` does.
        first.restart()
        becomes(first, "health", True)
        becomes(router, "health", True)
        check_answers(router)
        assert (router.stop(), first.stop()) == (0, 0)


def test_every_compose_service_is_built_from_a_target_that_exists() -> None:
    for service in read_compose(DEPLOY / "compose.yaml", {}).values():
        recipe = service["build"]
        context = (DEPLOY / recipe["context"]).resolve()
        assert context == ROOT
        file = parse((context / recipe["dockerfile"]).read_text())
        assert recipe.get("target", file.targets[-1]) in file.targets
        stages_args = {
            step.text.partition("=")[0]
            for target in file.targets
            for step in file.steps(target)
            if step.keyword == "ARG"
        }
        assert set(recipe.get("args", {})) <= stages_args


def test_compose_containers_may_do_little_and_get_time_to_stop() -> None:
    for service in read_compose(DEPLOY / "compose.yaml", {}).values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        # Router and shard let requests run for 30 s after SIGTERM.
        assert seconds(service["stop_grace_period"]) > 30


def test_the_compose_routers_shards_are_services_of_the_file() -> None:
    services = read_compose(DEPLOY / "compose.yaml", {})
    addresses = services["router"]["command"].split()[1].split(",")
    port = dockerfile("shard").image("cpu", "/bin").ports[0]
    assert addresses == [f"{name}:{port}" for name in services if name.startswith("shard")]


def test_the_gpu_file_changes_only_shards_and_gives_each_a_gpu_of_its_own() -> None:
    services = read_compose(DEPLOY / "compose.yaml", {})
    overrides = read_compose(DEPLOY / "compose.gpu.yaml", {})
    assert set(overrides) == {name for name in services if name.startswith("shard")}
    gpus = []
    for override in overrides.values():
        assert override["build"] == {"target": "cuda", "args": {"TORCH_INDEX_URL": ""}}
        assert override["image"] not in {service["image"] for service in services.values()}
        (device,) = override["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
    assert len(gpus) == len(set(gpus)) == len(overrides)


# ---- the chart -------------------------------------------------------------------------------


def test_the_charts_pods_answer_and_their_probes_flip_on_kill(
    images: Mapping[str, Built], tmp_path: Path
) -> None:
    values = {"shard": {"extraArgs": list(FAKE)}, "apiKey": {"existingSecret": "keys"}}
    resources = render(CHART, values, "demo")
    workloads = chart_workloads(resources, images, {"keys": {"api-key": KEY}})
    with running(workloads, tmp_path) as containers:
        router = containers["demo-penstock-router"]
        first, second = (c for name, c in containers.items() if "shard" in name)
        check_answers(router, KEY)
        assert router.status("/v1/models") == 401

        first.kill()
        assert not any(first.probe(name) for name in first.workload.probes)
        check_answers(router, KEY)
        assert router.probe("readiness")

        second.kill()
        becomes(router, "readiness", False)
        assert router.probe("liveness"), "a router is not restarted because its shards are gone"
        assert (router.status("/ready"), router.status("/health")) == (503, 200)
        assert router.stop() == 0


def test_the_chart_lints_without_a_complaint() -> None:
    report = helm_python.lint(CHART, strict=True)
    assert report["errors"] == []
    # 1 is information: a chart may have no icon.
    assert [m for m in report["messages"] if m["severity"] > 1] == []


def test_the_chart_is_of_the_version_of_the_project() -> None:
    with helm_python.Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == app_version()


@pytest.mark.parametrize(
    "values",
    [
        {"shard": {"replica": 3}},
        {"shards": {}},
        {"router": {"replicas": 0}},
        {"router": {"service": {"type": "External"}}},
        {"shard": {"extraArgs": "--runner fake"}},
        {"shard": {"gpus": -1}},
        {"apiKey": "secret"},
        {"shard": {"cache": {"persistent": "yes"}}},
    ],
)
def test_a_value_that_makes_no_sense_is_refused(values: Mapping[str, Any]) -> None:
    with pytest.raises(helm_python.HelmValuesError):
        render(CHART, values, "demo")


def test_every_value_is_in_the_schema() -> None:
    with helm_python.Chart.load(CHART) as chart:
        assert list(missing_in_schema(chart.values, json.loads(schema_text()), "")) == []


def test_a_value_without_a_schema_is_found() -> None:
    values = {"router": {"replicas": 1, "colour": "red"}, "extra": 1}
    found = list(missing_in_schema(values, json.loads(schema_text()), ""))
    assert found == ["/router/colour", "/extra"]


@pytest.mark.parametrize("shards", [1, 3])
def test_the_router_is_told_the_address_of_every_shard(shards: int) -> None:
    resources = render(CHART, {"shard": {"replicas": shards, "port": 6000}}, "demo")
    args = container_of(find(resources, "Deployment", "router"))["args"]
    service = find(resources, "Service", "shard")["metadata"]["name"]
    pods = [f"demo-penstock-shard-{index}.{service}:6000" for index in range(shards)]
    assert args[args.index("--shards") + 1].split(",") == pods


def test_services_select_the_pods_they_are_for_and_name_ports_that_exist() -> None:
    resources = render(CHART, {}, "demo")
    for kind, ending in (("Deployment", "router"), ("StatefulSet", "shard")):
        template = find(resources, kind, ending)["spec"]["template"]
        service = find(resources, "Service", ending)["spec"]
        assert service["selector"].items() <= template["metadata"]["labels"].items()
        names = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["ports"]} <= names
    assert find(resources, "Service", "shard")["spec"]["clusterIP"] == "None"
    assert find(resources, "Service", "shard")["spec"]["publishNotReadyAddresses"] is True


def test_pods_get_longer_to_end_than_their_requests_get_to_finish() -> None:
    values = {
        "router": {"shutdownTimeoutSeconds": 100, "preStopSeconds": 7},
        "shard": {"drainTimeoutSeconds": 200},
    }
    resources = render(CHART, values, "demo")
    for kind, flag, before_s in (
        ("Deployment", "--shutdown-timeout-s", 7),
        ("StatefulSet", "--drain-timeout", 0),
    ):
        spec = find(resources, kind, "")["spec"]["template"]["spec"]
        args = spec["containers"][0]["args"]
        timeout_s = int(args[args.index(flag) + 1])
        assert timeout_s in (100, 200)
        assert spec["terminationGracePeriodSeconds"] >= before_s + timeout_s + 10


@pytest.mark.parametrize(("kind", "name"), [("Deployment", "router"), ("StatefulSet", "cpu")])
def test_pods_run_as_the_user_of_their_image_and_may_do_little(kind: str, name: str) -> None:
    spec = find(render(CHART, {}, "demo"), kind, "")["spec"]["template"]["spec"]
    image = dockerfile("router" if name == "router" else "shard").image(name, "/bin")
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == image.user
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    writable = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/tmp", image.env.get("HOME", "/tmp")} <= writable


def test_a_shard_with_gpus_runs_the_cuda_image_and_asks_for_them() -> None:
    container = container_of(find(render(CHART, {"shard": {"gpus": 1}}, "demo"), "StatefulSet", ""))
    assert container["image"].endswith("-cuda")
    assert container["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": 1}
    without = container_of(find(render(CHART, {}, "demo"), "StatefulSet", ""))
    assert "nvidia.com/gpu" not in without["resources"]["limits"]


def test_a_persistent_cache_is_a_claim_of_each_pod() -> None:
    values = {"shard": {"cache": {"persistent": True, "size": "7Gi", "storageClass": "fast"}}}
    spec = find(render(CHART, values, "demo"), "StatefulSet", "")["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi"
    assert claim["spec"]["storageClassName"] == "fast"
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert claim["metadata"]["name"] not in volumes


def test_a_startup_probe_waits_as_long_as_it_is_told() -> None:
    resources = render(CHART, {"shard": {"startupSeconds": 600}}, "demo")
    probe = container_of(find(resources, "StatefulSet", ""))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 600


def test_flags_of_the_chart_and_the_compose_file_exist() -> None:
    from penstock_router.command_line import parse_config as parse_router
    from penstock_shard.command_line import parse_config as parse_shard

    values = {"shard": {"model": "an/id"}}
    resources = render(CHART, values, "demo")
    router = parse_router(container_of(find(resources, "Deployment", ""))["args"])
    shard = parse_shard(container_of(find(resources, "StatefulSet", ""))["args"])
    assert (router.workers, router.shutdown_timeout_s) == (1, 30.0)
    assert (shard.model, shard.port, shard.drain_timeout_s) == ("an/id", 50051, 30.0)


# ---- what the tests above share --------------------------------------------------------------


@contextlib.contextmanager
def running(workloads: Sequence[Workload], folder: Path) -> Iterator[dict[str, Container]]:
    """All workloads, started and healthy, by host name."""
    network = Network()
    for workload in workloads:
        network.join(workload)
    containers: dict[str, Container] = {}
    try:
        for workload in workloads:
            log_file = folder / f"{workload.host}.log"
            containers[workload.host] = Container(workload, network, log_file)
        for container in containers.values():
            for probe in container.workload.probes:
                becomes(container, probe, True)
        yield containers
    finally:
        for container in containers.values():
            container.kill()


def becomes(container: Container, probe: str, expected: bool) -> None:
    """Wait until a probe says so, or fail with the log."""

    def settled() -> bool:
        assert container.process.poll() is None, f"it ended; its log:\n{container.log}"
        return container.probe(probe) == expected

    what = f"{container.workload.host}: {probe} is {expected}"
    try:
        wait_until(settled, timeout_s=60, what=what)
    except AssertionError as error:
        raise AssertionError(f"{error}; its log:\n{container.log}") from None


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
    with urllib.request.urlopen(request, data, timeout=30) as response:
        return json.loads(response.read())


def container_of(resource: Mapping[str, Any]) -> Mapping[str, Any]:
    (container,) = resource["spec"]["template"]["spec"]["containers"]
    found: Mapping[str, Any] = container
    return found


def schema_text() -> str:
    return (CHART / "values.schema.json").read_text()


def missing_in_schema(
    values: Mapping[str, Any], schema: Mapping[str, Any], path: str
) -> Iterator[str]:
    """Paths of values that no property of the schema describes."""
    definitions = json.loads(schema_text())["$defs"]
    for name, value in values.items():
        described = schema.get("properties", {}).get(name)
        if described is None:
            yield f"{path}/{name}"
            continue
        if "$ref" in described:
            described = definitions[re.sub(r".*/", "", described["$ref"])]
        if isinstance(value, dict) and "properties" in described:
            yield from missing_in_schema(value, described, f"{path}/{name}")
