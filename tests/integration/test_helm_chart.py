"""What the chart renders, by Helm's own engine: valid, consistent, or refused.

Nothing is run here; `test_deploy.py` runs what is rendered.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import helm_python
import jsonschema_rs
import kubernetes_validate
import pytest
import yaml
from integration.dockerfile import parse
from integration.manifests import CHART, Resource, find, pod_templates, render, render_notes

from penstock_client.membership import DnsSource, UnionSource, parse_source
from penstock_router import command_line as router_command_line
from penstock_shard import command_line as shard_command_line

ROOT = Path(__file__).parents[2]
CRDS = Path(__file__).parent / "crds"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
NEWEST = kubernetes_validate.latest_version()

Values = Mapping[str, Any]

QWEN = {"name": "qwen", "model": "Qwen/Qwen3-0.6B", "gpus": 1}
BIG = {
    **{"name": "big", "model": "org/big", "gpus": 8, "nodes": 2},
    "cache": {"type": "existing", "existingClaim": "models"},
}
TO_ZERO = {"kind": "keda", "minReplicas": 0}
ROUTE = {"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}]}
SHARD_TLS = {"existingSecret": "shard-tls"}

# What an operator may want, by name; each is linted, rendered and checked in every way below.
CASES: dict[str, Values] = {
    "nothing": {},
    "another name": {"fullnameOverride": "llm"},
    "a part of the name": {"nameOverride": "serving", "imagePullSecrets": [{"name": "pull"}]},
    "one model": {"models": [QWEN]},
    "two models": {"models": [QWEN, {"name": "toy", "replicas": 1}]},
    "a longest name": {"models": [{"name": "a" * 20}], "fullnameOverride": "b" * 60},
    "no shards for now": {"models": [{"name": "toy", "replicas": 0}]},
    "names for clients": {"models": [{**QWEN, "servedNames": ["qwen", "default"]}]},
    "a slice of a gpu": {
        "models": [{**QWEN, "gpuResource": "nvidia.com/mig-1g.10gb", "runtimeClassName": "nvidia"}]
    },
    "several gpus": {"models": [{**QWEN, "gpus": 4}]},
    "several nodes": {"models": [BIG]},
    "several nodes, scaled": {"models": [{**BIG, "autoscaling": {"kind": "hpa"}}]},
    "several nodes, tls": {"models": [QWEN, BIG], "shardTls": {**SHARD_TLS, "mutual": True}},
    "a volume of each pod": {"shard": {"cache": {"type": "perPod", "storageClass": "fast"}}},
    "a claim that is shared": {
        "shard": {"cache": {"type": "existing", "existingClaim": "models"}},
        "models": [QWEN, {"name": "toy", "cache": {"type": "emptyDir", "size": "1Gi"}}],
    },
    "hpa": {"shard": {"autoscaling": {"kind": "hpa", "kvUsedRatio": 0.57}}},
    "keda": {"shard": {"autoscaling": {"kind": "keda", "maxReplicas": 9}}},
    "keda, to zero": {
        "models": [
            {**QWEN, "servedNames": ["qwen"], "autoscaling": TO_ZERO},
            {"name": "toy"},
        ],
        "router": {"shardWaitSeconds": 900},
    },
    "routers scaled": {"router": {"autoscaling": {"enabled": True}, "workers": 4}},
    "one key": {"apiKey": {"existingSecret": "penstock"}},
    "a file of keys": {
        "apiKeysFile": {"existingSecret": "penstock-keys"},
        "shardApiKey": {"existingSecret": "penstock"},
    },
    "all secrets": {
        "apiKey": {"existingSecret": "penstock", "key": "clients"},
        "apiKeysFile": {"existingSecret": "penstock-keys", "key": "all.toml"},
        "shardApiKey": {"existingSecret": "penstock"},
        "resumeKey": {"existingSecret": "penstock"},
        "shard": {"hubToken": {"existingSecret": "hub"}},
    },
    "https": {"router": {"tls": {"existingSecret": "router-tls"}}},
    "tls to shards": {"shardTls": SHARD_TLS},
    "tls both ways": {
        "shardTls": {**SHARD_TLS, "mutual": True, "routerSecret": "router", "serverName": "a.b"}
    },
    "ingress": {"ingress": {"enabled": True, "hosts": ["a.example.com"], "className": "nginx"}},
    "ingress, https to the end": {
        "ingress": {"enabled": True, "hosts": ["a.example.com", "b.c"], "tlsSecret": "hosts"},
        "router": {"tls": {"existingSecret": "router-tls"}},
    },
    "gateway": {"httpRoute": ROUTE},
    "gateway, with a host and a limit": {
        "httpRoute": {**ROUTE, "hostnames": ["*.example.com"], "timeout": "1h30m"}
    },
    "monitoring": {"monitoring": {"enabled": True, "labels": {"release": "prometheus"}}},
    "monitoring over https": {
        "monitoring": {"enabled": True},
        "router": {"tls": {"existingSecret": "router-tls"}},
    },
    "no policies": {
        "networkPolicies": {"enabled": False},
        "podDisruptionBudgets": {"enabled": False},
    },
    "no prometheus": {"networkPolicies": {"prometheus": []}},
    "a service outside": {
        "router": {"service": {"type": "LoadBalancer", "port": 80, "annotations": {"a/b": "c"}}}
    },
    "long drains": {
        "router": {"shutdownTimeoutSeconds": 100, "preStopSeconds": 7},
        "shard": {"drainTimeoutSeconds": 200, "startupSeconds": 600},
    },
    # YAML reads such words as numbers and truths.
    "names that look like something else": {
        "nameOverride": "on",
        "models": [
            {"name": "123", "runtimeClassName": "1", "servedNames": ["a: b #c"]},
            {"name": "true", "servedNames": ["x: y"], "autoscaling": TO_ZERO},
        ],
        "shard": {"cache": {"type": "perPod", "storageClass": "1"}, "hubToken": {"key": "yes"}},
        "router": {"tls": {"existingSecret": "1"}, "shardWaitSeconds": 1},
        "shardTls": {"existingSecret": "2", "mutual": True, "serverName": "123"},
        "apiKey": {"existingSecret": "3", "key": "yes"},
    },
    "defaults taken away": {
        "shard": {"resources": None, "affinity": None},
        "router": {"resources": None, "topologySpreadConstraints": None},
        "ingress": {"enabled": True, "hosts": ["a.example.com"], "annotations": None},
    },
    "fewer shards after two hours": {
        "models": [
            {"name": "a", "autoscaling": {"kind": "hpa", "cooldownSeconds": 7200}},
            {"name": "b", "autoscaling": {"kind": "keda", "cooldownSeconds": 7200}},
        ]
    },
    "everything more": {
        part: {
            "extraArgs": ["--log-level", "debug"] if part == "router" else ["--max-num-seqs", "8"],
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "files", "configMap": {"name": "files"}}],
            "extraVolumeMounts": [{"name": "files", "mountPath": "/files"}],
            "podAnnotations": {"a/b": "c"},
            "nodeSelector": {"disk": "fast"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "topologySpreadConstraints": [
                {
                    "topologyKey": "topology.kubernetes.io/zone",
                    "maxSkew": 2,
                    "whenUnsatisfiable": "DoNotSchedule",
                }
            ],
        }
        for part in ("router", "shard")
    },
}
every_case = pytest.mark.parametrize("case", CASES)


@cache
def rendered(case: str) -> list[Resource]:
    return render(CASES[case], "demo")


def defaults() -> dict[str, Any]:
    with helm_python.Chart.load(CHART) as chart:
        return chart.values


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
    """By the schemas of the oldest version of Kubernetes that the chart takes and of the newest; a
    custom resource by ours, and its pods by those.
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


# ---- refused -------------------------------------------------------------------------------------

# What is wrong, and what Helm says of it.
WRONG: list[tuple[Values, str]] = [
    ({"shards": {}}, "additional properties 'shards' not allowed"),
    ({"shard": {"replica": 3}}, "'/shard': additional properties 'replica' not allowed"),
    ({"models": [{"name": "a", "gpu": 1}]}, "'/models/0': additional properties 'gpu' not allowed"),
    ({"models": []}, "'/models': minItems: got 0, want 1"),
    ({"models": {"name": "a"}}, "'/models': got object, want array"),
    ({"models": [{"model": "org/a"}]}, "'/models/0': missing property 'name'"),
    ({"models": [{"name": "Qwen_3"}]}, "'/models/0/name': 'Qwen_3' does not match pattern"),
    ({"models": [{"name": "a" * 21}]}, "'/models/0/name': maxLength: got 21, want 20"),
    ({"models": [{"name": "a", "gpus": "1"}]}, "'/models/0/gpus': got string, want integer"),
    ({"shard": {"gpus": -1}}, "'/shard/gpus': minimum: got -1, want 0"),
    ({"shard": {"gpuResource": "gpu"}}, "'/shard/gpuResource': 'gpu' does not match pattern '/'"),
    ({"shard": {"nodes": 0}}, "'/shard/nodes': minimum: got 0, want 1"),
    ({"shard": {"extraArgs": "--runner fake"}}, "'/shard/extraArgs': got string, want array"),
    ({"shard": {"extraArgs": ["--seed", 1]}}, "'/shard/extraArgs/1': got number, want string"),
    ({"shard": {"extraEnv": [{"value": "b"}]}}, "'/shard/extraEnv/0': missing property 'name'"),
    ({"shard": {"cache": {"type": "nfs"}}}, "'/shard/cache/type': value must be one of 'emptyDir'"),
    ({"shard": {"cache": {"size": "50 GB"}}}, "'/shard/cache/size': '50 GB' does not match"),
    ({"shard": {"autoscaling": {"kind": "vpa"}}}, "'/shard/autoscaling/kind': value must be one"),
    (
        {"shard": {"autoscaling": {"kvUsedRatio": 80}}},
        "'/shard/autoscaling/kvUsedRatio': maximum: got 80, want 1",
    ),
    ({"router": {"replicas": 0}}, "'/router/replicas': minimum: got 0, want 1"),
    ({"router": {"service": {"type": "External"}}}, "'/router/service/type': value must be one of"),
    ({"router": {"service": {"port": 70000}}}, "'/router/service/port': maximum: got 70,000"),
    ({"router": {"shardWaitSeconds": "5m"}}, "'/router/shardWaitSeconds': got string, want integ"),
    ({"router": {"nodeSelector": {"a": True}}}, "'/router/nodeSelector/a': got boolean, want str"),
    ({"router": {"resources": {"memory": "1Gi"}}}, "'/router/resources': additional properties"),
    ({"apiKey": "secret"}, "'/apiKey': got string, want object"),
    ({"apiKey": {"existingSecret": "a", "key": ""}}, "'/apiKey/key': minLength: got 0, want 1"),
    ({"shardTls": {"mutual": "yes"}}, "'/shardTls/mutual': got string, want boolean"),
    ({"ingress": {"enabled": True}}, "'/ingress/hosts': minItems: got 0, want 1"),
    ({"httpRoute": {"enabled": True}}, "'/httpRoute/parentRefs': minItems: got 0, want 1"),
    ({"fullnameOverride": "LLM"}, "'/fullnameOverride': 'LLM' does not match pattern"),
    ({"nameOverride": "1st"}, "'/nameOverride': '1st' does not match pattern"),
    ({"httpRoute": {**ROUTE, "timeout": "an hour"}}, "'/httpRoute/timeout': 'an hour' does not"),
    ({"monitoring": {"interval": 15}}, "'/monitoring/interval': got number, want string"),
    ({"monitoring": {"prometheusUrl": "prom:9090"}}, "'/monitoring/prometheusUrl': 'prom:9090'"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_value_is_refused_by_its_name(values: Values, message: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        render(values, "demo")
    assert message in str(refusal.value)


# Values that are right, each by itself.
CONTRADICTIONS: list[tuple[Values, str]] = [
    ({"shard": {"name": "a"}}, "shard.name: shard is for all models"),
    ({"models": [{"name": "a"}, {"name": "a"}]}, "models: the name a is taken"),
    ({"models": [{"name": "router"}]}, "models: the name router is taken"),
    ({"shard": {"cache": {"type": "existing"}}}, "models, toy: cache.type existing needs"),
    ({"models": [{**BIG, "cache": {"type": "perPod"}}]}, "models, big: cache.type perPod is for"),
    ({"models": [{"name": "a", "nodes": 2}]}, "models, a: nodes 2 needs gpus"),
    (
        {"shard": {"autoscaling": {"kind": "hpa", "minReplicas": 5}}},
        "models, toy: autoscaling.maxReplicas 4 is below minReplicas 5",
    ),
    ({"shard": {"autoscaling": {**TO_ZERO, "kind": "hpa"}}}, "minReplicas 0 needs autoscaling.kin"),
    ({"shard": {"autoscaling": TO_ZERO}}, "minReplicas 0 needs router.shardWaitSeconds"),
    (
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 10}}},
        "router.autoscaling.maxReplicas 8 is below minReplicas 10",
    ),
]


@pytest.mark.parametrize(("values", "message"), CONTRADICTIONS, ids=[m for _, m in CONTRADICTIONS])
def test_values_that_contradict_each_other_are_refused(values: Values, message: str) -> None:
    with pytest.raises(helm_python.HelmRenderError) as refusal:
        render(values, "demo")
    assert message in str(refusal.value)


def test_every_value_has_a_schema_and_every_value_of_the_schema_a_default() -> None:
    values = defaults()
    assert list(missing_in_schema(values, SCHEMA, "")) == []
    assert SCHEMA["properties"].keys() - values.keys() == {"global"}
    assert SCHEMA["definitions"]["shard"]["properties"].keys() - values["shard"].keys() == {"name"}
    assert SCHEMA["properties"]["router"]["properties"].keys() == values["router"].keys()


def test_a_value_without_a_schema_is_found() -> None:
    values = {"router": {"replicas": 1, "colour": "red"}, "extra": 1}
    assert list(missing_in_schema(values, SCHEMA, "")) == ["/router/colour", "/extra"]


def missing_in_schema(values: Values, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Paths of values that no property of the schema describes."""
    for name, value in values.items():
        described = schema.get("properties", {}).get(name)
        if described is None:
            yield f"{path}/{name}"
            continue
        if "$ref" in described:
            described = SCHEMA["definitions"][re.sub(r".*/", "", described["$ref"])]
        if isinstance(value, dict) and "properties" in described:
            yield from missing_in_schema(value, described, f"{path}/{name}")


# ---- consistent ----------------------------------------------------------------------------------


def templates_of(resources: Sequence[Resource]) -> list[Resource]:
    return [template for resource in resources for template in pod_templates(resource)]


def selected(resources: Sequence[Resource], selector: Mapping[str, str]) -> list[Resource]:
    """The pod templates whose labels have all of a selector's."""
    return [
        template
        for template in templates_of(resources)
        if selector.items() <= template["metadata"]["labels"].items()
    ]


def container_of(template: Resource) -> Resource:
    (container,) = template["spec"]["containers"]
    found: Resource = container
    return found


def of_kind(resources: Sequence[Resource], *kinds: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] in kinds]


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


def args_of_router(resources: Sequence[Resource]) -> list[str]:
    template = find(resources, "Deployment", "-router")["spec"]["template"]
    args: list[str] = container_of(template)["args"]
    return args


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
        command_line = router_command_line if of_router else shard_command_line
        command_line.build_parser().parse_args(container_of(template)["args"])


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
def test_what_scales_by_itself_exists_and_has_no_number_in_the_chart(case: str) -> None:
    resources = rendered(case)
    for scaler in of_kind(resources, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        (workload,) = (
            r for r in of_kind(resources, target["kind"]) if r["metadata"]["name"] == target["name"]
        )
        assert workload["apiVersion"] == target["apiVersion"]
        assert "replicas" not in workload["spec"]


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
        claims = resource["spec"].get("volumeClaimTemplates", ())
        for template in pod_templates(resource):
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


@every_case
def test_pods_run_as_the_user_of_their_image_and_may_do_little(case: str) -> None:
    for template in templates_of(rendered(case)):
        spec, container = template["spec"], container_of(template)
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        image = image_of(container)
        assert f"{security['runAsUser']}:{security['runAsGroup']}" == image.user
        assert spec["automountServiceAccountToken"] is False
        may = container["securityContext"]
        assert (may["readOnlyRootFilesystem"], may["allowPrivilegeEscalation"]) == (True, False)
        assert may["capabilities"] == {"drop": ["ALL"]}
        writable = {
            mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
        }
        assert {"/tmp", image.env.get("HOME", "/tmp")} <= writable


def image_of(container: Resource) -> Any:
    """The image that a container runs, as its Dockerfile makes it."""
    repository, _, tag = container["image"].partition(":")
    name = repository.removeprefix("penstock-")
    target = "router" if name == "router" else tag.rpartition("-")[2]
    return parse((ROOT / "deploy" / f"Dockerfile.{name}").read_text()).image(target, "/bin")


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


def test_a_startup_probe_waits_as_long_as_it_is_told() -> None:
    template = shard_of({"shard": {"startupSeconds": 600}})["spec"]["template"]
    probe = container_of(template)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 600


def test_a_model_over_several_gpus_is_one_shard_which_is_not_served_yet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    templates = templates_of(rendered("several nodes"))[1:]
    assert len(templates) == 2, "the one that answers, and the others"
    for template in templates:
        args = container_of(template)["args"]
        assert args[args.index("--tensor-parallel-size") + 1] == "16"
        with pytest.raises(SystemExit):
            shard_command_line.parse_config(args)
        assert "--tensor-parallel-size 16: only 1 is served" in capsys.readouterr().err
    assert "refuses to start so" in render_notes(CASES["several nodes"], "demo")
    assert "refuses" not in render_notes({}, "demo")


def test_only_the_router_prometheus_and_pods_of_the_same_shard_reach_a_shard() -> None:
    (policy,) = of_kind(rendered("several nodes"), "NetworkPolicy")
    router, prometheus, same = policy["spec"]["ingress"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert [port["port"] for port in router["ports"]] == [50051]
    assert [port["port"] for port in prometheus["ports"]] == [9464]
    assert "ports" not in same
    (policy,) = of_kind(rendered("no prometheus"), "NetworkPolicy")
    assert len(policy["spec"]["ingress"]) == 1


def triggers_of(case: str) -> dict[str, str]:
    """The query of each."""
    (scaler,) = of_kind(rendered(case), "ScaledObject")
    return {t["name"]: t["metadata"]["query"] for t in scaler["spec"]["triggers"]}


def test_prometheus_takes_what_scalers_ask(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        reason = "there is no promtool (Debian: apt-get install prometheus)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    queries = {**triggers_of("keda"), **triggers_of("keda, to zero")}
    records = [{"record": f"query:{n}", "expr": q} for n, q in enumerate(queries.values())]
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "scalers", "rules": records}]}))
    subprocess.run(["promtool", "check", "rules", rules], check=True, capture_output=True)


def test_a_model_that_scales_to_zero_is_woken_by_requests_for_it_that_wait() -> None:
    query = triggers_of("keda, to zero")["held"]
    pattern = re.search(r"model=~(\"[^\"]*\")", query)
    assert pattern is not None
    names = re.compile(json.loads(pattern[1]))
    assert all(names.fullmatch(name) for name in ("qwen", "Qwen/Qwen3-0.6B", ""))
    assert not any(names.fullmatch(name) for name in ("penstock-toy", "Qwen/Qwen3-0x6B"))
    args = args_of_router(rendered("keda, to zero"))
    assert args[args.index("--shard-wait-s") + 1] == "900"
    expected = [value for flag, value in pairwise(args) if flag == "--expect-model"]
    assert expected == ["qwen"]


def test_the_routers_queue_scales_a_model_that_is_alone() -> None:
    assert list(triggers_of("keda")) == ["waiting", "kv-used", "queued"]
    assert list(triggers_of("keda, to zero")) == ["waiting", "kv-used", "in-use", "held"]
    (scaler,) = of_kind(rendered("hpa"), "HorizontalPodAutoscaler")
    targets = [next(m[k] for k in ("pods", "object") if k in m) for m in scaler["spec"]["metrics"]]
    assert [t["target"]["averageValue"] for t in targets] == ["8", "570m", "8"]
    described = scaler["spec"]["metrics"][-1]["object"]["describedObject"]["name"]
    assert described == find(rendered("hpa"), "Service", "-router")["metadata"]["name"]


def test_shards_go_when_they_were_not_needed_for_so_long() -> None:
    (scaler,) = of_kind(rendered("keda"), "ScaledObject")
    hpa = scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    # For the last shard, and for the others.
    assert scaler["spec"]["cooldownPeriod"] == 300
    assert hpa["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    resources = rendered("fewer shards after two hours")
    (scaler,) = of_kind(resources, "ScaledObject")
    assert scaler["spec"]["cooldownPeriod"] == 7200
    (by_cluster,) = of_kind(resources, "HorizontalPodAutoscaler")
    of_keda = scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    for hpa in (by_cluster["spec"], of_keda):
        # Kubernetes refuses more.
        assert hpa["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 3600


def test_scalers_look_at_the_pods_of_their_model_and_no_others() -> None:
    queries = triggers_of("keda")
    assert queries["queued"] == (
        'sum(penstock_router_sequences_queued{namespace="default",service="demo-penstock-router"})'
    )
    for name in ("waiting", "kv-used"):
        pods = re.search(r'pod=~"([^"]*)"', queries[name])
        assert pods is not None
        assert re.fullmatch(pods[1], "demo-penstock-toy-12")
        assert not re.fullmatch(pods[1], "demo-penstock-toy-b-1")


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


def test_the_router_sees_no_key_that_is_the_shards_alone() -> None:
    def mounted(name: str) -> Resource:
        (deployment,) = of_kind(rendered(name), "Deployment")
        volumes = deployment["spec"]["template"]["spec"]["volumes"]
        (volume,) = [volume["secret"] for volume in volumes if volume["name"] == "shard-tls"]
        found: Resource = volume
        return found

    one_sided = next(name for name, values in CASES.items() if values.get("shardTls") == SHARD_TLS)
    assert mounted(one_sided)["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    mutual = next(name for name, v in CASES.items() if v.get("shardTls", {}).get("mutual"))
    assert "items" not in mounted(mutual)
