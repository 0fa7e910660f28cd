"""Values about the chart's pods: their account, labels, images, containers and what they may do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
from integration.charts import (
    BIG,
    CASES,
    DIGEST,
    NOBODY,
    QWEN,
    Values,
    container_of,
    every_case,
    of_kind,
    rendered,
    templates_of,
)
from integration.images import image, target_of
from integration.manifests import Resource, find, render

BOTH = ("router", "shard")
# What a pod may mount where the Pod Security Standard "restricted" is enforced.
VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}


def containers_of(template: Resource) -> list[Resource]:
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def pods_of(values: Values) -> list[Resource]:
    """Return the pod templates of the router and of the shards."""
    resources = render(values, "demo")
    kinds = ("Deployment", "StatefulSet")
    return [find(resources, kind, "")["spec"]["template"] for kind in kinds]


# ---- what pods may do ------------------------------------------------------------------------


def violations(spec: Resource) -> Iterator[str]:
    """Yield the fields for which the Pod Security Standard "restricted" would refuse a pod."""
    yield from {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    pod = spec.get("securityContext", {})
    for volume in spec["volumes"]:
        yield from volume.keys() - {"name"} - VOLUMES
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        own = container.get("securityContext", {})
        both = {**pod, **own}
        capabilities = own.get("capabilities", {})
        allowed = {
            "runAsNonRoot": both.get("runAsNonRoot") is True,
            "runAsUser": both.get("runAsUser") != 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type")
            in ("RuntimeDefault", "Localhost"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "privileged": not own.get("privileged"),
            "drop": "ALL" in capabilities.get("drop", ()),
            "add": {*capabilities.get("add", ())} <= {"NET_BIND_SERVICE"},
            "hostPort": not any("hostPort" in port for port in container.get("ports", ())),
        }
        yield from (name for name, is_met in allowed.items() if not is_met)


@every_case
def test_every_pod_is_admitted_where_the_restricted_standard_is_enforced(case: str) -> None:
    found = [name for t in templates_of(rendered(case)) for name in violations(t["spec"])]
    assert found == (["runAsNonRoot"] if case == "less security" else [])


@every_case
def test_no_pod_is_given_a_token_of_the_cluster_nor_writes_to_its_root(case: str) -> None:
    for template in templates_of(rendered(case)):
        assert template["spec"]["automountServiceAccountToken"] is False
        may = container_of(template)["securityContext"]
        is_loose = case == "less security" and container_of(template)["name"] == "shard"
        assert may["readOnlyRootFilesystem"] is not is_loose


def test_pods_run_as_the_user_of_their_image_and_may_write_where_it_writes() -> None:
    for template in templates_of(render({"models": [QWEN, {"name": "toy"}]}, "demo")):
        security, container = template["spec"]["securityContext"], container_of(template)
        runs = image(target_of(container["image"]))
        assert f"{security['runAsUser']}:{security['runAsGroup']}" == runs.user
        writable = {
            mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
        }
        assert {"/tmp", runs.env.get("HOME", "/tmp")} <= writable


def test_security_contexts_are_changed_setting_by_setting() -> None:
    router, shard = (t["spec"] for t in templates_of(rendered("less security")))
    profile = {"type": "RuntimeDefault"}
    change = {"fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": profile}
    # As a cluster wants it that gives each namespace users of its own.
    assert router["securityContext"] == {"runAsNonRoot": True, **change}
    user = {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
    assert shard["securityContext"] == {**user, **change, "supplementalGroups": [44]}
    assert router["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
    }
    assert shard["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": False,
        "capabilities": {"drop": ["ALL"]},
    }


# ---- who they are ----------------------------------------------------------------------------


def test_pods_run_as_the_account_that_the_chart_makes_which_has_no_token() -> None:
    resources = rendered("an account")
    (account,) = of_kind(resources, "ServiceAccount")
    assert account["metadata"]["name"] == "demo-penstock"
    assert account["metadata"]["annotations"] == {"cloud.example/role": "models"}
    assert account["automountServiceAccountToken"] is False
    names = {template["spec"]["serviceAccountName"] for template in templates_of(resources)}
    assert (names, len(templates_of(resources))) == ({"demo-penstock"}, 4)


@pytest.mark.parametrize(
    ("account", "used", "made"),
    [
        ({}, None, []),
        ({"name": "a"}, "a", []),
        ({"create": True, "name": "a"}, "a", ["a"]),
    ],
)
def test_an_account_is_made_only_where_that_is_asked_for(
    account: Values, used: str | None, made: list[str]
) -> None:
    resources = render({"serviceAccount": account}, "demo")
    assert {t["spec"].get("serviceAccountName") for t in templates_of(resources)} == {used}
    assert [each["metadata"]["name"] for each in of_kind(resources, "ServiceAccount")] == made


def test_labels_of_everything_are_on_everything_and_a_pods_own_come_first() -> None:
    resources = rendered("labels of everything")
    for resource in resources:
        labels = resource["metadata"]["labels"]
        assert (labels["team"], labels["stage"]) == ("search", "on")
    router, *shards = templates_of(resources)
    assert router["metadata"]["labels"].items() >= {"team": "search", "stage": "1"}.items()
    assert {shard["metadata"]["labels"]["stage"] for shard in shards} == {"on"}
    assert len(shards) == 3


def test_labels_that_are_added_select_nothing() -> None:
    for case in ("labels of everything", "everything more"):
        for workload in of_kind(rendered(case), "Deployment", "StatefulSet"):
            assert not {"team", "stage"} & workload["spec"]["selector"]["matchLabels"].keys()


@pytest.mark.parametrize("label", ["app.kubernetes.io/name", "helm.sh/chart", "model"])
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("commonLabels", "commonLabels"),
        ("router", "router.podLabels"),
        ("shard", "models, toy: shard.podLabels"),
    ],
)
def test_a_label_that_the_chart_sets_is_refused_by_its_name(
    label: str, where: str, said: str
) -> None:
    labels = {label: "x"}
    values = {where: labels if where == "commonLabels" else {"podLabels": labels}}
    with pytest.raises(helm_python.HelmRenderError) as refusal:
        render(values, "demo")
    assert f"{said}: the label {label} is set by the chart" in str(refusal.value)


@pytest.mark.parametrize("part", BOTH)
def test_annotations_of_a_workload_and_of_its_pods_are_apart(part: str) -> None:
    values = {part: {"annotations": {"a": "1"}, "podAnnotations": {"b": "2"}}, "models": [{**BIG}]}
    kind = "Deployment" if part == "router" else "LeaderWorkerSet"
    workload = find(render(values, "demo"), kind, "")
    assert workload["metadata"]["annotations"] == {"a": "1"}
    for template in templates_of([workload]):
        assert template["metadata"]["annotations"] == {"b": "2"}
    (other,) = of_kind(render({part: {"annotations": {"a": "1"}}}, "demo"), "StatefulSet")
    assert other["metadata"].get("annotations") == (None if part == "router" else {"a": "1"})


# ---- what runs in them -------------------------------------------------------------------------


def test_an_image_with_a_digest_is_that_and_no_tag() -> None:
    router, shard = (container_of(t) for t in templates_of(rendered("images by digest")))
    assert router["image"] == f"penstock-router@{DIGEST}"
    assert shard["image"] == f"r.example/shard-cuda@{DIGEST}"


def test_a_tag_of_your_own_takes_the_place_of_the_version() -> None:
    image = {"repository": "r.example/own", "tag": "1"}
    for template in pods_of({part: {"image": image} for part in BOTH}):
        assert container_of(template)["image"] == "r.example/own:1"


def test_more_containers_start_before_and_beside_and_may_do_no_more_unless_they_say_so() -> None:
    for template in pods_of(CASES["everything more"]):
        (first,) = template["spec"]["initContainers"]
        own, beside = template["spec"]["containers"]
        assert (first["name"], own["name"] in BOTH, beside["name"]) == ("first", True, "beside")
        assert first["securityContext"] == own["securityContext"]
        assert beside["securityContext"] == NOBODY
        assert "securityContext" not in CASES["everything more"]["router"]["initContainers"][0]


def test_a_pod_has_the_priority_it_is_given() -> None:
    values: dict[str, Any] = {part: {"priorityClassName": part} for part in BOTH}
    assert [pod["spec"]["priorityClassName"] for pod in pods_of(values)] == [*BOTH]
    assert not any("priorityClassName" in pod["spec"] for pod in pods_of({}))


def test_what_a_model_says_of_its_pods_is_for_it_alone() -> None:
    own = {"priorityClassName": "high", "podLabels": {"tier": "1"}, "extraContainers": []}
    shared = {"podLabels": {"team": "a"}, "extraContainers": [{"name": "b", "image": "c"}]}
    values = {"shard": shared, "models": [{"name": "a", **own}, {"name": "b"}]}
    resources = render(values, "demo")
    a, b = (find(resources, "StatefulSet", f"-{name}")["spec"]["template"] for name in "ab")
    assert a["metadata"]["labels"].items() >= {"team": "a", "tier": "1"}.items()
    assert "tier" not in b["metadata"]["labels"]
    assert [len(containers_of(each)) for each in (a, b)] == [1, 2]
    assert (a["spec"]["priorityClassName"], "priorityClassName" in b["spec"]) == ("high", False)
