"""The chart renders valid and consistent resources. Helm's own engine renders them.

Nothing is run here; `test_deploy.py` runs the rendered workloads.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import jsonschema_rs
import kubernetes_validate
import pytest
import yaml
from integration.charts import (
    BIG,
    CASES,
    OF_VLLM,
    QWEN,
    ROUTE,
    TO_ZERO,
    Values,
    args_of_router,
    container_of,
    every_case,
    of_kind,
    rendered,
    selected,
    templates_of,
)
from integration.images import Image, image, target_of
from integration.manifests import CHART, Resource, find, pod_templates, render, render_notes

from penstock_client.fleet.discovery import DnsSource, UnionSource, parse_source
from penstock_common.flags import parser_of
from penstock_router.config import RouterConfig
from penstock_shard.cli import parse_config as parse_shard_config
from penstock_shard.config import ShardConfig

ROOT = Path(__file__).parents[2]
CRDS = Path(__file__).parent / "crds"
NEWEST = kubernetes_validate.latest_version()


# ---- valid -------------------------------------------------------------------------------------


def test_there_are_combinations_enough() -> None:
    assert len(CASES) >= 25


@every_case
def test_helm_finds_nothing_to_complain_of(case: str) -> None:
    report = helm_python.lint(CHART, dict(CASES[case]), strict=True)
    assert report["errors"] == []
    # 1 is information: a chart may have no icon.
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@every_case
def test_every_manifest_is_what_kubernetes_takes(case: str) -> None:
    for resource in rendered(case):
        check_manifest(resource)


@cache
def crd(kind: str) -> Any:
    return jsonschema_rs.validator_for(json.loads((CRDS / f"{kind}.json").read_text()))


def check_manifest(resource: Resource) -> None:
    """Validate a resource by the schemas of the oldest Kubernetes that the chart takes and of the
    newest. A custom resource is validated by our schema, and its pods by the newest Kubernetes.
    """
    _check_manifest(json.dumps(resource))


@cache  # most combinations of values have most manifests in common
def _check_manifest(text: str) -> None:
    resource = json.loads(text)
    if not (CRDS / f"{resource['kind']}.json").exists():
        for version in (oldest_version(), NEWEST):
            kubernetes_validate.validate(resource, version, strict=True)
        return
    crd(resource["kind"]).validate(resource)
    for template in pod_templates(resource):
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        kubernetes_validate.validate(pods, NEWEST, strict=True)


@cache
def oldest_version() -> str:
    with helm_python.Chart.load(CHART) as chart:
        wanted = re.fullmatch(r">=(\d+\.\d+)\.0-0", chart.metadata["kubeVersion"])
    assert wanted is not None
    return wanted[1]


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec/replica", 1),
        ("StatefulSet", "spec/template/spec/containers/0/livenessProbe/grpc/port", "grpc"),
        ("LeaderWorkerSet", "spec/leaderWorkerTemplate/sizes", 2),
        ("LeaderWorkerSet", "spec/leaderWorkerTemplate/workerTemplate/spec/container", []),
        ("ServiceMonitor", "spec/endpoints/0/interval", "15 s"),
        ("PodMonitor", "spec/podMetricsEndpoint", []),
        ("ScaledObject", "spec/triggers/0/metadata/threshold", 8),
        ("HTTPRoute", "spec/rules/0/timeouts/request", "1 hour"),
    ],
)
def test_a_manifest_that_is_wrong_is_found(kind: str, path: str, value: object) -> None:
    values = {
        "models": [BIG, {**QWEN, "autoscaling": TO_ZERO}],
        "router": {"shardWaitSeconds": 1},
        "monitoring": {"enabled": True},
        "httpRoute": ROUTE,
    }
    resource: Any = copy.deepcopy(find(render(values, "demo"), kind, ""))
    check_manifest(resource)
    *parents, name = path.split("/")
    node = resource
    for parent in parents:
        node = node[int(parent) if parent.isdigit() else parent]
    node[name] = value
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema_rs.ValidationError)):
        check_manifest(resource)


DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
EXAMPLES = [
    yaml.safe_load(text)
    for text in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    if not text.startswith("apiVersion:")
]


@pytest.mark.parametrize("values", EXAMPLES, ids=[" ".join(values) for values in EXAMPLES])
def test_values_in_the_document_are_taken(values: Values) -> None:
    for resource in render(values, "demo"):
        check_manifest(resource)


# ---- consistent ----------------------------------------------------------------------------------


@every_case
def test_no_two_resources_have_one_name(case: str) -> None:
    names = [(r["kind"], r["metadata"]["name"]) for r in rendered(case)]
    assert len(set(names)) == len(names)
    assert max(len(name) for _, name in names) <= 49


@every_case
def test_workloads_select_their_own_pods_and_nobody_elses(case: str) -> None:
    resources = rendered(case)
    for workload in of_kind(resources, "Deployment", "StatefulSet"):
        labels = workload["spec"]["selector"]["matchLabels"]
        assert selected(resources, labels) == [workload["spec"]["template"]]


@every_case
def test_services_lead_to_ports_of_the_pods_they_are_for(case: str) -> None:
    resources = rendered(case)
    for service in of_kind(resources, "Service"):
        (template,) = selected(resources, service["spec"]["selector"])
        ports = {port["name"] for port in container_of(template)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        if service["metadata"]["name"].endswith("-router"):
            continue
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True


@every_case
def test_probes_ask_at_ports_that_are_open(case: str) -> None:
    for template in templates_of(rendered(case)):
        container = container_of(template)
        ports = {port[key] for port in container.get("ports", ()) for key in port}
        probes = [
            container.get(f"{name}Probe", {}) for name in ("startup", "liveness", "readiness")
        ]
        if template["metadata"]["labels"]["app.kubernetes.io/component"] == "shard-worker":
            assert (probes, ports) == ([{}] * 3, set())
            continue
        for probe in probes:
            if "exec" in probe:
                assert int(probe["exec"]["command"][-1].partition(":")[2]) in ports
            else:
                asked = probe.get("grpc") or probe["httpGet"]
                assert asked["port"] in ports


@every_case
def test_the_router_is_told_the_service_of_each_model(case: str) -> None:
    resources = rendered(case)
    services = {
        service["metadata"]["name"]: service["spec"]["ports"][0]["port"]
        for service in of_kind(resources, "Service")
        if not service["metadata"]["name"].endswith("-router")
    }
    args = args_of_router(resources)
    source = parse_source(args[args.index("--shards") + 1])
    parts = source.parts if isinstance(source, UnionSource) else [source]
    assert all(isinstance(part, DnsSource) for part in parts)
    assert {part.name: part.port for part in parts if isinstance(part, DnsSource)} == services


@pytest.mark.parametrize("part", ["shard", "models"])
def test_the_number_of_shards_is_nothing_to_the_router(part: str) -> None:
    def router(replicas: int) -> Resource:
        values: dict[str, Any] = {"shard": {"replicas": replicas}}
        if part == "models":
            values = {"models": [{"name": "toy", "replicas": replicas}]}
        return find(render(values, "demo"), "Deployment", "-router")

    assert router(1) == router(7)


@every_case
def test_flags_exist(case: str) -> None:
    for template in templates_of(rendered(case)):
        of_router = template["metadata"]["labels"]["app.kubernetes.io/component"] == "router"
        parser = parser_of(RouterConfig if of_router else ShardConfig, "", "")
        parser.parse_args(told(container_of(template)["args"]))


def told(args: list[str]) -> list[str]:
    """Return the arguments as a pod gets them: with its index and its leader's address."""
    values = {"$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "leader.demo"}
    return [values.get(arg, arg) for arg in args]


@every_case
def test_budgets_policies_and_monitors_are_about_pods_that_exist(case: str) -> None:
    resources = rendered(case)
    for budget in of_kind(resources, "PodDisruptionBudget"):
        assert len(selected(resources, budget["spec"]["selector"]["matchLabels"])) == 1
    for policy in of_kind(resources, "NetworkPolicy"):
        spec = policy["spec"]
        shards = selected(resources, spec["podSelector"]["matchLabels"])
        ports = {
            port["containerPort"]
            for template in shards
            for port in container_of(template).get("ports", ())
        }
        for rule in spec["ingress"]:
            assert {port["port"] for port in rule.get("ports", ())} <= ports
            for peer in rule["from"]:
                if "podSelector" in peer and "namespaceSelector" not in peer:
                    assert selected(resources, peer["podSelector"]["matchLabels"])
    for monitor in of_kind(resources, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        for template in selected(resources, monitor["spec"]["selector"]["matchLabels"]):
            assert endpoint["port"] in {port["name"] for port in container_of(template)["ports"]}
    for monitor in of_kind(resources, "ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (
            service
            for service in of_kind(resources, "Service")
            if labels.items() <= service["metadata"]["labels"].items()
        )
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


@every_case
def test_routes_lead_to_a_port_of_the_routers_service(case: str) -> None:
    resources = rendered(case)
    service = find(resources, "Service", "-router")
    (port,) = service["spec"]["ports"]
    for ingress in of_kind(resources, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            backend = rule["http"]["paths"][0]["backend"]["service"]
            assert backend == {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
    for route in of_kind(resources, "HTTPRoute"):
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        assert backend == {"name": service["metadata"]["name"], "port": port["port"]}


@every_case
def test_volumes_that_are_mounted_exist_and_files_that_are_named_are_mounted(case: str) -> None:
    for resource in rendered(case):
        for template in pod_templates(resource):
            claims = resource["spec"].get("volumeClaimTemplates", ())
            container = container_of(template)
            volumes = [volume["name"] for volume in template["spec"]["volumes"]]
            volumes += [claim["metadata"]["name"] for claim in claims]
            assert len(set(volumes)) == len(volumes)
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            folders = {mount["mountPath"] for mount in container["volumeMounts"]}
            probes = [container.get(f"{name}Probe", {}) for name in ("startup", "liveness")]
            words = sum((p.get("exec", {}).get("command", []) for p in probes), container["args"])
            files = [word for word in words if word.startswith("/etc/")]
            assert {str(Path(file).parent) for file in files} <= folders


@every_case
def test_pods_get_longer_to_end_than_their_requests_get_to_finish(case: str) -> None:
    for template in templates_of(rendered(case)):
        container = container_of(template)
        args = container["args"]
        flag = "--shutdown-timeout-s" if "--shards" in args else "--drain-timeout-s"
        before_s = 0
        if "lifecycle" in container:
            command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
            assert command == "sleep"
            before_s = int(seconds)
        needed_s = before_s + int(args[args.index(flag) + 1])
        assert template["spec"]["terminationGracePeriodSeconds"] >= needed_s + 10


def image_of(container: Resource) -> Image:
    """The image that a container runs, as the Dockerfile makes it."""
    return image(target_of(container["image"]))


def test_ports_are_those_that_the_images_listen_on() -> None:
    for template in templates_of(rendered("several gpus")):
        container = container_of(template)
        assert container["ports"][0]["containerPort"] in image_of(container).ports


# ---- what single values do -----------------------------------------------------------------------


def shard_of(values: Values, kind: str = "StatefulSet") -> Resource:
    return find(render(values, "demo"), kind, "")


def test_the_chart_is_of_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with helm_python.Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == project["version"]


def test_a_model_says_what_is_different_for_it() -> None:
    values = {
        "shard": {"replicas": 3, "gpus": 1, "resources": {"limits": {"cpu": "8"}}},
        "models": [
            {"name": "a", "extraArgs": ["--max-num-seqs", "8"]},
            {"name": "b", "replicas": 1, "gpus": 0, "resources": {"limits": {"memory": "1Gi"}}},
        ],
    }
    resources = render(values, "demo")
    a, b = (find(resources, "StatefulSet", f"-{name}")["spec"] for name in "ab")
    assert (a["replicas"], b["replicas"]) == (3, 1)
    limits = [container_of(s["template"])["resources"]["limits"] for s in (a, b)]
    assert limits == [
        {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": 1},
        {"cpu": "8", "memory": "1Gi"},
    ]
    assert "--max-num-seqs" in container_of(a["template"])["args"]
    assert "--max-num-seqs" not in container_of(b["template"])["args"]


def test_a_shard_with_gpus_runs_the_cuda_image() -> None:
    assert container_of(shard_of({"shard": {"gpus": 1}})["spec"]["template"])["image"].endswith(
        "-cuda"
    )
    assert container_of(shard_of({})["spec"]["template"])["image"].endswith("-cpu")


def test_a_persistent_cache_is_a_claim_of_each_pod() -> None:
    cache = {"type": "perPod", "size": "7Gi", "storageClass": "fast"}
    (claim,) = shard_of({"shard": {"cache": cache}})["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi"
    assert claim["spec"]["storageClassName"] == "fast"


@pytest.mark.parametrize(
    ("shard", "waited_s"),
    [
        ({}, 1800),
        ({"startupSeconds": 600}, 600),
        ({"engine": "vllm", "gpus": 1}, 3600),
        ({"engine": "vllm", "gpus": 1, "startupSeconds": 600}, 600),
    ],
)
def test_a_startup_probe_waits_as_long_as_it_is_told(shard: Values, waited_s: int) -> None:
    probe = container_of(shard_of({"shard": shard})["spec"]["template"])["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == waited_s


def test_a_model_over_several_gpus_is_one_shard() -> None:
    templates = templates_of(rendered("several nodes"))[1:]
    assert len(templates) == 2, "the one that answers, and the others"
    for template in templates:
        args = container_of(template)["args"]
        assert args[args.index("--tensor-parallel-size") + 1] == "16"
        config = parse_shard_config(told(args))
        assert (config.nnodes, config.node_rank, config.master_addr) == (2, 1, "leader.demo")
        assert mount_of(template, "/dev/shm")["emptyDir"]["medium"] == "Memory"


def test_a_model_over_the_gpus_of_one_machine_needs_to_know_of_no_other() -> None:
    template = shard_of({"shard": {"gpus": 2}})["spec"]["template"]
    args = container_of(template)["args"]
    assert parse_shard_config(args).tensor_parallel_size == 2
    assert "--nnodes" not in args
    assert mount_of(template, "/dev/shm")["emptyDir"]["sizeLimit"] == "1Gi"
    assert mount_of(shard_of({})["spec"]["template"], "/dev/shm") == {}


@pytest.mark.parametrize(
    ("shard", "size"),
    [
        ({"engine": "vllm", "gpus": 1}, "8Gi"),
        ({"engine": "vllm", "gpus": 4, "sharedMemory": "20Gi"}, "20Gi"),
        ({"gpus": 2, "sharedMemory": "3Gi"}, "3Gi"),
        ({"sharedMemory": "3Gi"}, "3Gi"),
    ],
)
def test_shared_memory_is_a_volume_in_memory_of_a_bounded_size(shard: Values, size: str) -> None:
    template = shard_of({"shard": shard})["spec"]["template"]
    volume = mount_of(template, "/dev/shm")["emptyDir"]
    assert volume == {"medium": "Memory", "sizeLimit": size}


def mount_of(template: Any, path: str) -> Any:
    """The volume that is mounted there; empty if there is none."""
    mounts = container_of(template)["volumeMounts"]
    names = [mount["name"] for mount in mounts if mount["mountPath"] == path]
    return next((one for one in template["spec"]["volumes"] if one["name"] in names), {})


def test_only_the_router_prometheus_and_pods_of_the_same_shard_reach_a_shard() -> None:
    (policy,) = of_kind(rendered("several nodes"), "NetworkPolicy")
    router, prometheus, same = policy["spec"]["ingress"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert [port["port"] for port in router["ports"]] == [50051]
    assert [port["port"] for port in prometheus["ports"]] == [9464]
    assert "ports" not in same
    (policy,) = of_kind(rendered("no prometheus"), "NetworkPolicy")
    assert len(policy["spec"]["ingress"]) == 1


def test_shards_of_one_checkpoint_are_peers_and_may_reach_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_KV_PEER_KEY", "of peers")
    resources = rendered("peers")
    shards = [container_of(template) for template in templates_of(resources)]
    shards = [container for container in shards if container["name"] == "shard"]
    configs = [parse_shard_config(shard["args"]) for shard in shards]
    addresses = ("demo-penstock-prompts:50051", "demo-penstock-tokens:50051")
    assert [(config.kv_peers, config.role) for config in configs] == [
        (addresses, "prefill"),
        (addresses, "decode"),
        ((), "both"),
    ]
    env = [{each["name"] for each in shard.get("env", [])} for shard in shards]
    assert ["PENSTOCK_KV_PEER_KEY" in names for names in env] == [True, True, False]
    policies = of_kind(resources, "NetworkPolicy")
    assert [len(policy["spec"]["ingress"]) for policy in policies] == [4, 4, 2]


def test_an_ingress_lets_answers_take_their_time_and_come_in_pieces() -> None:
    (ingress,) = of_kind(rendered("ingress, https to the end"), "Ingress")
    annotations = ingress["metadata"]["annotations"]
    nginx = "nginx.ingress.kubernetes.io"
    assert annotations[f"{nginx}/proxy-buffering"] == "off"
    assert annotations[f"{nginx}/backend-protocol"] == "HTTPS"
    assert int(annotations[f"{nginx}/proxy-read-timeout"]) >= 3600


def test_the_notes_say_how_to_ask_and_what_to_expect() -> None:
    assert "No API key is asked for" in render_notes({}, "demo")
    assert "wait for up to 900 s" in render_notes(CASES["keda, to zero"], "demo")
    assert "Bearer $KEY" in render_notes(CASES["a file of keys"], "demo")
    assert "curl --insecure https://" in render_notes(CASES["https"], "demo")


# ---- vLLM's engine -----------------------------------------------------------------------------


def vllm_pod(**settings: Any) -> Any:
    """The template of a pod whose engine is vLLM's."""
    return shard_of({"models": [{**OF_VLLM, **settings}]})["spec"]["template"]


def test_the_engine_is_chosen_by_model_with_arguments_of_its_own() -> None:
    arguments = {"kv_cache_dtype": "fp8", "max_num_partial_prefills": 2, "x": {"a": [True]}}
    values = {"models": [{**OF_VLLM, "engineArgs": arguments}, {"name": "toy"}]}
    _, of_vllm, own = (container_of(t) for t in templates_of(render(values, "demo")))
    config = parse_shard_config(of_vllm["args"])
    assert (config.engine, config.engine_python) == ("vllm", image_python())
    # As the engine reads them, a text too.
    read = {name: json.loads(text) for name, text in config.engine_args}
    assert read == arguments
    assert parse_shard_config(own["args"]).engine == "penstock"
    assert not [word for word in own["args"] if word.startswith("--engine")]


def image_python() -> str:
    """The Python that the image's own entry point names."""
    words = image("shard-vllm").entrypoint
    return words[words.index("--engine-python") + 1]


def test_another_image_may_have_vllm_elsewhere() -> None:
    container = container_of(vllm_pod(enginePython="/opt/vllm/bin/python", image={"tag": "own"}))
    assert container["image"] == "penstock-shard:own"
    assert parse_shard_config(container["args"]).engine_python == "/opt/vllm/bin/python"


@pytest.mark.parametrize(
    ("cache", "kind"),
    [
        ({}, "emptyDir"),
        ({"type": "existing", "existingClaim": "models"}, "persistentVolumeClaim"),
    ],
)
def test_what_vllm_compiles_is_kept_where_models_are(cache: Values, kind: str) -> None:
    template = vllm_pod(cache=cache)
    env = image("shard-vllm").env
    for name in ("HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert kind in mount_of(template, str(Path(env[name]).parent)), name
    claims = shard_of({"models": [{**OF_VLLM, "cache": {"type": "perPod"}}]})["spec"]
    assert claims["volumeClaimTemplates"][0]["metadata"]["name"] == "cache"


def test_no_service_of_the_namespace_sets_a_variable_that_vllm_reads() -> None:
    """A service that is named vllm would set VLLM_PORT."""
    assert vllm_pod()["spec"]["enableServiceLinks"] is False


def test_of_what_vllm_listens_on_nothing_is_reached_from_other_pods() -> None:
    resources = rendered("vllm's engine")
    policy = find(resources, "NetworkPolicy", "-qwen")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert selected(resources, policy["podSelector"]["matchLabels"])
    # A rule without ports would be for all of them.
    assert [[port["port"] for port in rule["ports"]] for rule in policy["ingress"]] == [
        [50051],
        [9464],
    ]
    container = container_of(find(resources, "StatefulSet", "-qwen")["spec"]["template"])
    assert {port["containerPort"] for port in container["ports"]} == {50051, 9464}


# ---- The shards' key ---------------------------------------------------------------------------

_FILE = {"apiKeysFile": {"existingSecret": "penstock-keys"}}


def key_of_shards(resource: Resource) -> dict[str, str] | None:
    """Return the place in a secret from which a workload's pods take the key that shards ask for;
    None without such a key.
    """
    (template,) = pod_templates(resource)
    env = {each["name"]: each for each in template["spec"]["containers"][0].get("env", ())}
    names = ("PENSTOCK_SHARD_API_KEY", "PENSTOCK_API_KEY")
    found = next((env[name] for name in names if name in env), None)
    return None if found is None else found["valueFrom"]["secretKeyRef"]


def test_with_a_file_of_keys_alone_the_chart_makes_a_key_for_the_shards() -> None:
    resources = render(_FILE, "demo")
    (secret,) = (each for each in resources if each["kind"] == "Secret")
    (name, value), *_ = secret["data"].items()
    assert len(base64.b64decode(value)) == 48
    used = {"name": secret["metadata"]["name"], "key": name}
    assert used == {"name": "demo-penstock-shard-key", "key": "shard-api-key"}
    for kind, ending in (("Deployment", "router"), ("StatefulSet", "toy")):
        assert key_of_shards(find(resources, kind, ending)) == used
    assert used["name"] in render_notes(_FILE, "demo")
    (other,) = (each for each in render(_FILE, "demo") if each["kind"] == "Secret")
    assert other["data"][name] != value


@pytest.mark.parametrize(
    ("values", "used"),
    [
        ({}, None),
        ({"apiKey": {"existingSecret": "a"}}, {"name": "a", "key": "api-key"}),
        ({**_FILE, "apiKey": {"existingSecret": "a"}}, {"name": "a", "key": "api-key"}),
        ({**_FILE, "shardApiKey": {"existingSecret": "b"}}, {"name": "b", "key": "shard-api-key"}),
        ({**_FILE, "shardTls": {"existingSecret": "tls", "mutual": True}}, None),
    ],
)
def test_where_shards_know_their_routers_already_the_chart_makes_no_key(
    values: Values, used: dict[str, str] | None
) -> None:
    resources = render(values, "demo")
    assert not [each for each in resources if each["kind"] == "Secret"]
    assert key_of_shards(find(resources, "StatefulSet", "toy")) == used
    assert "shard-key" not in render_notes(values, "demo")
