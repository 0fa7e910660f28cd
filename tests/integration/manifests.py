"""Compose files and rendered charts, read as lists of workloads. Runs nothing.

Strict: a key of a service or a container that this module does not know is an error, so that
nothing written there goes untested in silence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import helm_python
import yaml
from integration.containers import Probe, Workload
from integration.images import Image

_SERVICE_KEYS = frozenset(
    [
        "image",
        "build",
        "command",
        "environment",
        "ports",
        "expose",
        "profiles",
        "networks",
        "user",
        "deploy",
        "depends_on",
        "healthcheck",
        "stop_grace_period",
        "volumes",
        "restart",
        "init",
        "read_only",
        "tmpfs",
        "cap_drop",
        "security_opt",
        "hostname",
        "pids_limit",
        "mem_limit",
        "cpus",
    ]
)
_CONTAINER_KEYS = frozenset(
    [
        "name",
        "image",
        "imagePullPolicy",
        "securityContext",
        "args",
        "env",
        "ports",
        "livenessProbe",
        "readinessProbe",
        "startupProbe",
        "lifecycle",
        "resources",
        "volumeMounts",
    ]
)
_INTERPOLATION = re.compile(r"\$\{(\w+):-([^}]*)\}")

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "penstock"

Resource = Mapping[str, Any]
Images = Mapping[str, Image]
Secrets = Mapping[str, Mapping[str, str]]


def read_compose(
    path: Path, environment: Mapping[str, str], *profiles: str
) -> dict[str, dict[str, Any]]:
    """The services of a compose file that start with these profiles, with variables put in."""
    services: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
    services = {
        name: service
        for name, service in services.items()
        if not service.get("profiles") or {*service["profiles"]} & {*profiles}
    }
    filled: dict[str, dict[str, Any]] = _interpolate(services, environment)
    for service in filled.values():
        if "environment" not in service:
            continue
        # A variable without a value is passed on from the host when it is set there.
        service["environment"] = {
            name: environment[name] if value is None else value
            for name, value in service["environment"].items()
            if value is not None or name in environment
        }
    return filled


def _interpolate(node: Any, environment: Mapping[str, str]) -> Any:
    """Put variables into every text: as compose does, after the YAML is read."""
    if isinstance(node, dict):
        return {name: _interpolate(value, environment) for name, value in node.items()}
    if isinstance(node, list):
        return [_interpolate(value, environment) for value in node]
    if not isinstance(node, str):
        return node
    text = _INTERPOLATION.sub(lambda m: environment.get(m[1]) or m[2], node)
    assert "$" not in text, f"{node}: a form of variable that is not known here"
    return text


def compose_workloads(services: Mapping[str, Mapping[str, Any]], images: Images) -> list[Workload]:
    """Return a workload for each service; the keys of `images` are the compose file's names."""
    found = []
    for name, service in services.items():
        unknown = set(service) - _SERVICE_KEYS
        assert not unknown, f"{name}: {sorted(unknown)} not known here"
        image = images[service["image"]]
        (port,) = image.ports
        kind, *command = service["healthcheck"]["test"]
        assert kind == "CMD", f"{name}: a health check without a shell"
        found.append(
            Workload(
                host=name,
                port=port,
                more_ports=tuple(map(int, service.get("expose", ()))),
                image=image,
                arguments=tuple(shlex.split(service["command"])),
                environment=service["environment"],
                probes={"health": Probe(tuple(command))},
                grace_s=seconds(service["stop_grace_period"]),
            )
        )
    return found


def seconds(text: str) -> float:
    """A duration as compose and Docker write it: one number and one unit."""
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]


def render(values: Mapping[str, Any], name: str) -> list[Resource]:
    """The resources of the chart, rendered without a cluster."""
    texts = [text for path, text in _render(values, name).items() if path.endswith(".yaml")]
    return [part for text in texts for part in yaml.safe_load_all(text) if part is not None]


def render_notes(values: Mapping[str, Any], name: str) -> str:
    """Return the notes that Helm prints after an installation."""
    return _render(values, name)["penstock/templates/NOTES.txt"]


def _render(values: Mapping[str, Any], name: str) -> dict[str, str]:
    with helm_python.Chart.load(CHART) as chart:
        files: dict[str, str] = chart.render(dict(values), name=name, namespace="default")
    return files


def pod_templates(resource: Resource) -> list[Resource]:
    """Return the pod templates of a resource; none if it runs no pods."""
    if resource["kind"] in ("Deployment", "StatefulSet"):
        return [resource["spec"]["template"]]
    if resource["kind"] == "LeaderWorkerSet":
        group = resource["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return []


def find(resources: Sequence[Resource], kind: str, ending: str) -> Resource:
    """The one resource of a kind whose name ends so."""
    (found,) = (
        r for r in resources if r["kind"] == kind and r["metadata"]["name"].endswith(ending)
    )
    return found


def chart_workloads(
    resources: Sequence[Mapping[str, Any]], images: Images, secrets: Secrets
) -> list[Workload]:
    """Return a workload for each pod; the keys of `images` are repository and tag."""
    found = []
    for resource in resources:
        assert resource["kind"] != "LeaderWorkerSet", "several pods in one are not known here"
        if resource["kind"] not in ("Deployment", "StatefulSet"):
            continue
        spec = resource["spec"]
        for index in range(spec["replicas"]):
            host, service = resource["metadata"]["name"], ""
            if resource["kind"] == "Deployment" and index:
                host = f"{host}-{index}"
            if resource["kind"] == "StatefulSet":
                service = spec["serviceName"]
                host = f"{host}-{index}.{service}"
            found.append(_pod(host, service, spec["template"]["spec"], images, secrets))
    return found


def _pod(host: str, service: str, spec: Resource, images: Images, secrets: Secrets) -> Workload:
    (container,) = spec["containers"]
    unknown = set(container) - _CONTAINER_KEYS
    assert not unknown, f"{host}: {sorted(unknown)} not known here"
    port, *more_ports = container["ports"]
    return Workload(
        host=host,
        port=port["containerPort"],
        image=images[container["image"]],
        arguments=tuple(container["args"]),
        environment=dict(_variable(entry, secrets) for entry in container.get("env", ())),
        probes={
            name: _probe(container[f"{name}Probe"], port)
            for name in ("startup", "readiness", "liveness")
        },
        grace_s=spec["terminationGracePeriodSeconds"],
        more_ports=tuple(more["containerPort"] for more in more_ports),
        service=service,
        files=dict(_files(spec["volumes"], container["volumeMounts"], secrets)),
        https=container["readinessProbe"].get("httpGet", {}).get("scheme") == "HTTPS",
    )


def _files(
    volumes: Sequence[Resource], mounts: Sequence[Resource], secrets: Secrets
) -> Iterator[tuple[str, str]]:
    """Yield the path of each mounted secret file, and its content."""
    paths = {mount["name"]: mount["mountPath"] for mount in mounts}
    for volume in volumes:
        name, (kind,) = volume["name"], volume.keys() - {"name"}
        assert kind in ("emptyDir", "secret"), f"{name}: a volume of kind {kind} not known here"
        if kind == "secret":
            secret = secrets[volume["secret"]["secretName"]]
            named = {item["key"]: item["path"] for item in volume["secret"].get("items", ())}
            for key, path in (named or {key: key for key in secret}).items():
                yield f"{paths[name]}/{path}", secret[key]


def _variable(entry: Mapping[str, Any], secrets: Secrets) -> tuple[str, str]:
    if "value" in entry:
        return entry["name"], entry["value"]
    reference = entry["valueFrom"]["secretKeyRef"]
    return entry["name"], secrets[reference["name"]][reference["key"]]


def _probe(probe: Mapping[str, Any], port: Mapping[str, Any]) -> Probe:
    timeout_s = probe["timeoutSeconds"]
    if "httpGet" in probe:
        assert probe["httpGet"]["port"] in (port["name"], port["containerPort"])
        return Probe(http_path=probe["httpGet"]["path"], timeout_s=timeout_s)
    if "exec" in probe:
        return Probe(command=tuple(probe["exec"]["command"]), timeout_s=timeout_s)
    # The one kind of probe that takes no name of a port.
    assert probe["grpc"]["port"] == port["containerPort"]
    return Probe(grpc_service=probe["grpc"].get("service", ""), timeout_s=timeout_s)
