"""The chart's scalers and secrets: what they look at, and who is given them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from integration.charts import (
    CASES,
    SHARD_TLS,
    args_of_router,
    every_case,
    of_kind,
    rendered,
)
from integration.manifests import Resource, find

from penstock_common.shared_flags import model_name

# ---- scalers -----------------------------------------------------------------------------------


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
    assert _expected_models("keda, to zero") == ["qwen"]


def _expected_models(case: str) -> list[str]:
    args = args_of_router(rendered(case))
    return [value for flag, value in pairwise(args) if flag == "--expect-model"]


def test_a_model_that_scales_to_zero_is_expected_by_the_name_that_its_shards_give_it() -> None:
    path = "/models/qwen3.gguf"
    assert _expected_models("keda, to zero, by path") == [model_name(path)] == ["qwen3"]
    assert "|qwen3" in triggers_of("keda, to zero, by path")["held"]


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


# ---- secrets -----------------------------------------------------------------------------------


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
