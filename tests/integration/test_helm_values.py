"""Values of the chart: each has a schema and a default; what is wrong is refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import helm_python
import pytest
from integration.charts import BIG, OF_VLLM, ROUTE, TO_ZERO, Values
from integration.manifests import CHART, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text())

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
    ({"shard": {"kvHostMemory": "1T"}}, "'/shard/kvHostMemory': '1T' does not match pattern"),
    ({"shard": {"kvHostMemory": "8192"}}, "'/shard/kvHostMemory': '8192' does not match pattern"),
    ({"shard": {"kvHostMemory": "0"}}, "'/shard/kvHostMemory': '0' does not match pattern"),
    ({"shard": {"role": "both?"}}, "'/shard/role': value must be one of"),
    ({"shard": {"engine": "vLLM"}}, "'/shard/engine': value must be one of"),
    ({"shard": {"engineArgs": ["seed=1"]}}, "'/shard/engineArgs': got array, want object"),
    ({"shard": {"engineArgs": {"max-x": 1}}}, "invalid propertyName 'max-x'"),
    ({"shard": {"enginePython": "python3"}}, "'/shard/enginePython': 'python3' does not match"),
    ({"shard": {"sharedMemory": "8 GB"}}, "'/shard/sharedMemory': '8 GB' does not match pattern"),
    ({"shard": {"startupSeconds": 0}}, "'/shard/startupSeconds': minimum: got 0, want 1"),
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
    ({"router": {"sessionAffinity": True}}, "'/router/sessionAffinity': got boolean, want object"),
    (
        {"router": {"sessionAffinity": {"timeoutSeconds": 86401}}},
        "'/router/sessionAffinity/timeoutSeconds': maximum: got 86,401, want 86,400",
    ),
    ({"router": {"sessionAffinity": {"timeout": 1}}}, "'/router/sessionAffinity': additional prop"),
    ({"router": {"image": {"digest": "abc"}}}, "'/router/image/digest': 'abc' does not match"),
    ({"shard": {"image": {"digests": ""}}}, "'/shard/image': additional properties 'digests'"),
    ({"router": {"podLabel": {}}}, "'/router': additional properties 'podLabel' not allowed"),
    ({"shard": {"podLabels": {"a": 1}}}, "'/shard/podLabels/a': got number, want string"),
    ({"commonLabels": {"a": True}}, "'/commonLabels/a': got boolean, want string"),
    ({"shard": {"annotations": ["a"]}}, "'/shard/annotations': got array, want object"),
    ({"router": {"priorityClassName": 1}}, "'/router/priorityClassName': got number, want string"),
    ({"serviceAccount": {"named": "a"}}, "'/serviceAccount': additional properties 'named' not"),
    ({"serviceAccount": {"create": "yes"}}, "'/serviceAccount/create': got string, want boolean"),
    ({"router": {"initContainers": {}}}, "'/router/initContainers': got object, want array"),
    (
        {"shard": {"extraContainers": [{"name": "a"}]}},
        "'/shard/extraContainers/0': missing property 'image'",
    ),
    (
        {"router": {"securityContext": {"readOnlyRootFileSystem": False}}},
        "'/router/securityContext': additional properties 'readOnlyRootFileSystem' not allowed",
    ),
    (
        {"models": [{"name": "a", "podSecurityContext": {"runAsUser": "me"}}]},
        "'/models/0/podSecurityContext/runAsUser': got string, want",
    ),
    (
        {"shard": {"securityContext": {"capabilities": {"drops": ["ALL"]}}}},
        "'/shard/securityContext/capabilities': additional properties 'drops' not allowed",
    ),
    (
        {"monitoring": {"rules": {"on": True}}},
        "'/monitoring/rules': additional properties 'on' not",
    ),
    (
        {"monitoring": {"dashboards": {"labels": "a"}}},
        "'/monitoring/dashboards/labels': got string",
    ),
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
    ({"models": [{**OF_VLLM, "gpus": 0}]}, "models, qwen: engine vllm needs gpus"),
    ({"models": [{**OF_VLLM, "nodes": 2}]}, "models, qwen: engine vllm serves a model on one node"),
    ({"models": [{**OF_VLLM, "kvHostMemory": "8G"}]}, "models, qwen: engine vllm keeps no copies"),
    ({"shard": {"engineArgs": {"seed": 1}}}, "models, toy: engineArgs needs engine vllm"),
    ({"shard": {"role": "prefill"}}, "models, toy: role prefill needs kvHostMemory and kvPeerKey"),
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


def defaults() -> dict[str, Any]:
    with helm_python.Chart.load(CHART) as chart:
        return chart.values
