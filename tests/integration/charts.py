"""Values that operators may give the chart, by name, and functions to look at what it renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from integration.manifests import Resource, find, pod_templates, render
from support.budget import in_soak

Values = Mapping[str, Any]

QWEN = {"name": "qwen", "model": "Qwen/Qwen3-0.6B", "gpus": 1}
OF_VLLM = {**QWEN, "engine": "vllm"}
BIG = {
    **{"name": "big", "model": "org/big", "gpus": 8, "nodes": 2},
    "cache": {"type": "existing", "existingClaim": "models"},
}
TO_ZERO = {"kind": "keda", "minReplicas": 0}
ROUTE = {"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}]}
SHARD_TLS = {"existingSecret": "shard-tls"}

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
NOBODY = {
    "runAsUser": 65534,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}

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
    "keda, to zero, by path": {
        "models": [{**QWEN, "model": "/models/qwen3.gguf", "autoscaling": TO_ZERO}],
        "router": {"shardWaitSeconds": 900},
    },
    "routers scaled": {"router": {"autoscaling": {"enabled": True}, "workers": 4}},
    "clients come back to their router": {"router": {"sessionAffinity": {"enabled": True}}},
    "clients come back, through an ingress": {
        "router": {"sessionAffinity": {"enabled": True, "timeoutSeconds": 600}, "replicas": 3},
        "resumeKey": {"existingSecret": "penstock"},
        "ingress": {"enabled": True, "hosts": ["a.example.com"]},
    },
    "an account": {
        "serviceAccount": {"create": True, "annotations": {"cloud.example/role": "models"}},
        "models": [QWEN, BIG],
    },
    "an account that exists": {"serviceAccount": {"name": "1"}},
    "labels of everything": {
        "commonLabels": {"team": "search", "stage": "on"},
        "router": {"podLabels": {"stage": "1"}},
        "monitoring": {
            "enabled": True,
            "rules": {"enabled": True},
            "dashboards": {"enabled": True},
        },
        "models": [QWEN, BIG],
    },
    "images by digest": {
        "router": {"image": {"digest": DIGEST, "tag": "not this one"}},
        "models": [{**QWEN, "image": {"repository": "r.example/shard-cuda", "digest": DIGEST}}],
    },
    "less security": {
        "shard": {"podSecurityContext": {"runAsNonRoot": None, "supplementalGroups": [44]}},
        "models": [{"name": "a", "securityContext": {"readOnlyRootFilesystem": False}}],
        "router": {
            "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
            "securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}},
        },
    },
    "one key": {"apiKey": {"existingSecret": "penstock"}},
    "a file of keys alone": {"apiKeysFile": {"existingSecret": "penstock-keys"}},
    "a file of keys, tls both ways": {
        "apiKeysFile": {"existingSecret": "penstock-keys"},
        "shardTls": {**SHARD_TLS, "mutual": True},
    },
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
    "peers": {
        "models": [
            {**QWEN, "name": "prompts", "kvHostMemory": "8G", "role": "prefill"},
            {**QWEN, "name": "tokens", "kvHostMemory": "8G", "role": "decode"},
            {"name": "toy"},
        ],
        "kvPeerKey": {"existingSecret": "penstock"},
    },
    "peers over tls": {
        "shard": {"kvHostMemory": "512M"},
        "kvPeerKey": {"existingSecret": "penstock", "key": "peers"},
        "shardTls": {**SHARD_TLS, "mutual": True},
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
    "alerts and dashboards": {
        "monitoring": {
            "enabled": True,
            "labels": {"prometheus": "main"},
            "rules": {"enabled": True},
            "dashboards": {"enabled": True, "annotations": {"grafana_folder": "penstock"}},
        }
    },
    "dashboards alone": {"monitoring": {"dashboards": {"enabled": True, "labels": {"d": "1"}}}},
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
            "initContainers": [{"name": "first", "image": "busybox:1.36"}],
            "extraContainers": [
                {"name": "beside", "image": "busybox:1.36", "securityContext": NOBODY}
            ],
            "annotations": {"d/e": "f"},
            "podAnnotations": {"a/b": "c"},
            "podLabels": {"team": "search"},
            "priorityClassName": "high",
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
    "vllm's engine, tls": {
        "models": [{**OF_VLLM, "gpus": 2, "engineArgs": {"seed": 1}}],
        "shardTls": {**SHARD_TLS, "mutual": True},
    },
    "vllm's engine": {
        "models": [OF_VLLM, {"name": "toy"}],
        "monitoring": {"enabled": True},
    },
}
every_case = pytest.mark.parametrize(
    "case",
    [case if number % 3 == 0 else in_soak(case) for number, case in enumerate(CASES)],
)


@cache
def rendered(case: str) -> list[Resource]:
    return render(CASES[case], "demo")


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
    """The one that runs an image of ours."""
    containers: list[Resource] = template["spec"]["containers"]
    (found,) = (each for each in containers if each["name"] in ("router", "shard"))
    return found


def of_kind(resources: Sequence[Resource], *kinds: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] in kinds]


def args_of_router(resources: Sequence[Resource]) -> list[str]:
    template = find(resources, "Deployment", "-router")["spec"]["template"]
    args: list[str] = container_of(template)["args"]
    return args
