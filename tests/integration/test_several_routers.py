"""Several routers as the chart runs them: who has a stored response, who goes on with a stream.

Two pods of the router and two shards, as local processes, behind a stand-in for what kube-proxy
makes of the chart's service.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from integration.charts import Values, of_kind
from integration.containers import Container
from integration.manifests import Resource, chart_workloads, find, render, render_notes
from integration.test_deploy import FAKE, images, running
from support.cluster_service import cluster_service
from support.resumable_answers import Answer, read

AFFINITY: Values = {"router": {"sessionAffinity": {"enabled": True}}}
NO_AFFINITY: Values = {"router": {"replicas": 2}}
# Of loopback, all of which is this machine.
CLIENTS = ("127.0.0.2", "127.0.0.3")
LONG = {"prompt": "The fox", "max_tokens": 300, "seed": 5, "ignore_eos": True, "stream": True}


# ---- what the chart renders ------------------------------------------------------------------


def router_of(values: Values) -> Resource:
    router: Resource = find(render(values, "demo"), "Deployment", "-router")["spec"]
    return router


def service_of(values: Values) -> Resource:
    service: Resource = find(render(values, "demo"), "Service", "-router")["spec"]
    return service


@pytest.mark.parametrize(
    ("router", "replicas"),
    [
        ({}, 1),
        ({"sessionAffinity": {"enabled": True}}, 2),
        ({"sessionAffinity": {"enabled": True}, "replicas": 1}, 1),
        ({"replicas": 3}, 3),
    ],
)
def test_there_are_two_routers_unasked_only_where_clients_come_back_to_theirs(
    router: Values, replicas: int
) -> None:
    assert router_of({"router": router})["replicas"] == replicas


def test_clients_come_back_for_as_long_as_they_are_told() -> None:
    assert "sessionAffinity" not in service_of({})
    for seconds in (86400, 600):
        affinity = {"enabled": True, "timeoutSeconds": seconds}
        service = service_of({"router": {"sessionAffinity": affinity}})
        assert service["sessionAffinity"] == "ClientIP"
        assert service["sessionAffinityConfig"] == {"clientIP": {"timeoutSeconds": seconds}}
    assert service_of(AFFINITY)["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"] == 86400


def test_an_ingress_which_asks_pods_and_not_the_service_chooses_by_client_too() -> None:
    name = "nginx.ingress.kubernetes.io/upstream-hash-by"

    def annotations(values: Values) -> Mapping[str, str]:
        ingress = {"enabled": True, "hosts": ["a.example.com"]}
        (found,) = of_kind(render({"ingress": ingress, **values}, "demo"), "Ingress")
        given: Mapping[str, str] = found["metadata"]["annotations"]
        return given

    assert name not in annotations({})
    assert annotations(AFFINITY)[name] == "$remote_addr"
    own = {"enabled": True, "hosts": ["a"], "annotations": {name: "$http_authorization"}}
    assert annotations({**AFFINITY, "ingress": own})[name] == "$http_authorization"


@pytest.mark.parametrize(
    ("values", "is_made"),
    [
        ({}, False),
        (AFFINITY, True),
        (NO_AFFINITY, True),
        ({"router": {"autoscaling": {"enabled": True}}}, True),
        ({"router": {"autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 1}}}, False),
        ({**AFFINITY, "resumeKey": {"existingSecret": "own"}}, False),
    ],
)
def test_several_routers_have_a_key_for_resumed_streams_in_common(
    values: Values, is_made: bool
) -> None:
    resources = render(values, "demo")
    secrets = of_kind(resources, "Secret")
    assert [each["metadata"]["name"] for each in secrets] == ["demo-penstock-resume-key"] * is_made
    container = find(resources, "Deployment", "-router")["spec"]["template"]["spec"]["containers"]
    env = {each["name"]: each for each in container[0].get("env", ())}
    if not is_made and "resumeKey" not in values:
        assert "PENSTOCK_RESUME_KEY" not in env
        return
    used = env["PENSTOCK_RESUME_KEY"]["valueFrom"]["secretKeyRef"]
    assert used == {"name": "demo-penstock-resume-key" if is_made else "own", "key": "resume-key"}
    for secret in secrets:
        assert len(base64.b64decode(secret["data"]["resume-key"])) >= 16
        assert secret["metadata"]["name"] in render_notes(values, "demo")


def test_the_notes_say_when_clients_lose_their_responses() -> None:
    warning = "previous_response_id fails at the others"
    route = {"enabled": True, "parentRefs": [{"name": "public"}]}
    assert warning in render_notes(NO_AFFINITY, "demo")
    assert warning in render_notes({"router": {"autoscaling": {"enabled": True}}}, "demo")
    assert warning not in render_notes(AFFINITY, "demo")
    assert "previous_response_id" not in render_notes({}, "demo")
    through_gateway = render_notes({**AFFINITY, "httpRoute": route}, "demo")
    assert "have the gateway keep their sessions" in through_gateway


# ---- what then happens -----------------------------------------------------------------------


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[list[Container]]:
    """Two, as the chart renders them with the affinity; without it they are the same."""
    assert router_of(AFFINITY) == router_of(NO_AFFINITY)
    resources = render({**AFFINITY, "shard": {"extraArgs": [*FAKE]}}, "demo")
    secrets = {
        secret["metadata"]["name"]: {
            key: base64.b64decode(value).decode() for key, value in secret["data"].items()
        }
        for secret in of_kind(resources, "Secret")
    }
    workloads = [
        # One that is killed leaves its temporary files behind.
        dataclasses.replace(each, environment={**each.environment, "TMPDIR": str(tmp_path)})
        for each in chart_workloads(resources, images(), secrets)
    ]
    with running(workloads, tmp_path) as containers:
        found = [each for name, each in containers.items() if "-router" in name]
        assert len(found) == 2
        yield found


async def respond(url: str, client: str, **fields: object) -> tuple[int, Any]:
    """The status and the body of an answer of /v1/responses, over a connection of its own."""
    body = {"model": "penstock-toy", "input": "Hi", "max_output_tokens": 8, **fields}
    return await ask(url + "/v1/responses", client, body)


async def ask(url: str, client: str, body: object = None) -> tuple[int, Any]:
    connector = aiohttp.TCPConnector(local_addr=(client, 0))
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, url, json=body) as response,
    ):
        return response.status, await response.json()


async def test_with_the_affinity_each_client_finds_its_responses_and_its_streams(
    routers: list[Container],
) -> None:
    ports = [router.port for router in routers]
    by_client = service_of(AFFINITY)["sessionAffinity"] == "ClientIP"
    async with cluster_service(ports, by_client=by_client) as service:
        made = {}
        for client in CLIENTS:
            status, first = await respond(service.url, client)
            assert status == 200
            made[client] = first["id"]
            for _ in range(5):
                status, next_one = await respond(
                    service.url, client, previous_response_id=first["id"]
                )
                assert (status, next_one["previous_response_id"]) == (200, first["id"])
                found, _ = await ask(f"{service.url}/v1/responses/{first['id']}", client)
                assert found == 200
        # Each was at a router of its own, which alone knows what it made.
        assert sorted(service.known.values()) == sorted(ports)
        for client, response_id in made.items():
            for router in routers:
                found, _ = await ask(f"{router.url}/v1/responses/{response_id}", client)
                assert found == (200 if service.known[client] == router.port else 404)

        whole = Answer()
        await read(service.url, "/v1/completions", LONG, whole)
        for client in CLIENTS:
            assert await in_two_pieces(service.url, client) == whole.shown
        resumed = 'penstock_router_resumed_streams_total{how="live"} 1.0'
        for router in routers:
            assert resumed in await metrics_of(router), "at the router that makes it"


async def in_two_pieces(url: str, client: str) -> tuple[object, ...]:
    """Read a stream that breaks and is resumed, and return the content of the answer."""
    answer = Answer()
    assert await read(url, "/v1/completions", LONG, answer, most=6, client=client) == 200
    assert not answer.done
    assert await read(url, "/v1/completions", LONG, answer, client=client) == 200
    assert answer.done
    return answer.shown


async def metrics_of(router: Container) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{router.url}/metrics") as response:
        return await response.text()


async def test_where_a_router_dies_its_streams_go_on_at_the_other_and_its_responses_are_lost(
    routers: list[Container],
) -> None:
    client = CLIENTS[0]
    async with cluster_service([each.port for each in routers], by_client=True) as service:
        status, response = await respond(service.url, client)
        assert status == 200
        whole, answer = Answer(), Answer()
        await read(service.url, "/v1/completions", LONG, whole, client=client)
        await read(service.url, "/v1/completions", LONG, answer, most=6, client=client)
        lost = next(each for each in routers if each.port == service.known[client])
        lost.kill()
        assert await read(service.url, "/v1/completions", LONG, answer, client=client) == 200
        assert answer.shown == whole.shown
        status, body = await respond(service.url, client, previous_response_id=response["id"])
        assert (status, response["id"] in body["error"]["message"]) == (400, True)
        (other,) = (each for each in routers if each is not lost)
        assert 'resumed_streams_total{how="again"} 1.0' in await metrics_of(other)
        status, _ = await respond(service.url, client)
        assert (status, service.known[client]) == (200, other.port)


async def test_without_the_affinity_streams_go_on_anywhere_and_half_of_the_responses_are_not_found(
    routers: list[Container],
) -> None:
    ports = [router.port for router in routers]
    by_client = service_of(NO_AFFINITY).get("sessionAffinity") == "ClientIP"
    async with cluster_service(ports, by_client=by_client) as service:
        _, first = await respond(service.url, CLIENTS[0])
        statuses = [
            (await respond(service.url, CLIENTS[0], previous_response_id=first["id"]))[0]
            for _ in range(6)
        ]
        assert statuses == [400, 200] * 3
        whole = Answer()
        await read(service.url, "/v1/completions", LONG, whole)
        for _ in range(4):
            assert await in_two_pieces(service.url, CLIENTS[0]) == whole.shown
        texts = [await metrics_of(router) for router in routers]
        assert sum('resumed_streams_total{how="again"} 4.0' in text for text in texts) == 1
