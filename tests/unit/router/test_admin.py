"""The operator's door: what it shows, what it changes, and to whom it is closed."""

from __future__ import annotations

import asyncio
import json
import socket
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from support.router_doubles import FakeFleet, FakeShard, MemoryRouter, memory_router

from penstock_client.fleet import allowed_networks
from penstock_client.fleet.allowed_networks import AddressInfo
from penstock_router.routes.admin import Changes

KEY = {"Authorization": "Bearer operator"}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The addresses of hosts by name, 10.0.0.2 for all others: nothing here asks the network."""
    ips: dict[str, str] = {}

    async def resolve(name: str, port: int) -> list[AddressInfo]:
        return [(socket.AF_INET, 1, 6, "", (ips.get(name, "10.0.0.2"), port))]

    monkeypatch.setattr(allowed_networks, "system_resolve", resolve)
    return ips


def _shards(fleet: FakeFleet) -> list[str]:
    return [shard.address for shard in fleet.shards]


async def test_without_a_key_of_the_router_s_the_door_is_closed() -> None:
    async with memory_router(FakeFleet({}), api_key="clients") as router:
        answer = await router.get("/admin/shards", Authorization="Bearer clients")
        assert answer.status == 403
        assert "--admin-key" in answer.error["message"]


@pytest.mark.parametrize(
    ("given", "status"),
    [(None, 401), ("Bearer wrong", 401), ("operator", 401), ("Bearer clients", 403)],
)
async def test_without_the_key_nothing_is_shown_and_nothing_changes(
    given: str | None, status: int
) -> None:
    headers = {} if given is None else {"Authorization": given}
    async with memory_router(FakeFleet({}), api_key="clients", admin_key="operator") as router:
        before = _shards(router.fleet)
        answers = [
            await router.get("/admin/shards", **headers),
            await router.post("/admin/shards", {"address": "b:2"}, **headers),
            await router.request("DELETE", "/admin/shards/fake:1", headers=headers),
            await router.request("POST", "/admin/shards/fake:1/drain", headers=headers),
        ]
        assert [answer.status for answer in answers] == [status] * 4
        assert _shards(router.fleet) == before
        assert not router.fleet.shards[0].load.draining


async def test_shards_are_shown_added_drained_and_removed() -> None:
    async with memory_router(FakeFleet({}), admin_key="operator") as router:
        (shown,) = (await router.get("/admin/shards", **KEY)).json()["shards"]
        assert (shown["address"], shown["ready"]) == ("fake:1", True)
        assert (shown["state"], shown["model"]) == ("serving", "fake-model")
        assert (await router.post("/admin/shards", {"address": "B:2"}, **KEY)).status == 202
        assert _shards(router.fleet) == ["fake:1", "b:2"]
        answer = await router.request("POST", "/admin/shards/b:2/drain", headers=KEY)
        assert (answer.status, router.fleet.shards[1].load.handing_over) == (202, True)
        answer = await router.request("DELETE", "/admin/shards/b:2", headers=KEY)
        assert (answer.status, _shards(router.fleet)) == (202, ["fake:1"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "address: must be a string"),
        ({"address": 5}, "address: must be a string"),
        ({"address": "nowhere"}, "'nowhere' is not HOST:PORT"),
    ],
)
async def test_a_bad_address_is_one_line(body: object, words: str) -> None:
    async with memory_router(FakeFleet({}), admin_key="operator") as router:
        answer = await router.post("/admin/shards", body, **KEY)
        assert (answer.status, words in answer.error["message"]) == (400, True)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("169.254.169.254:80", "169.254.169.254 is link-local: no shard is there"),
        ("[fe80::1]:50051", "fe80::1 is link-local"),
        ("0.0.0.0:50051", "0.0.0.0 is unspecified"),
        ("8.8.8.8:50051", "8.8.8.8, which is outside of --shard-networks (127.0.0.0/8, "),
        ("rebound.example:50051", "169.254.169.254 is link-local"),
        ("stranger.example:50051", "leads to 203.0.113.7, which is outside of --shard-networks"),
    ],
)
async def test_a_shard_is_added_only_where_shards_may_be(
    address: str, words: str, names: dict[str, str]
) -> None:
    names |= {"rebound.example": "169.254.169.254", "stranger.example": "203.0.113.7"}
    async with memory_router(FakeFleet({}), admin_key="operator") as router:
        answer = await router.post("/admin/shards", {"address": address}, **KEY)
        assert (answer.status, answer.error["param"]) == (400, "address")
        assert words in answer.error["message"]
        assert _shards(router.fleet) == ["fake:1"]


async def test_networks_that_the_operator_lists_are_allowed(names: dict[str, str]) -> None:
    listed = (ip_network("203.0.113.0/24"),)
    names["far.example"] = "203.0.113.7"
    fleet = FakeFleet({})
    async with memory_router(fleet, admin_key="operator", shard_networks=listed) as router:
        for address, status in (("far.example:1", 202), ("203.0.113.8:1", 202), ("b:1", 400)):
            answer = await router.post("/admin/shards", {"address": address}, **KEY)
            assert answer.status == status


async def test_where_a_name_led_when_it_was_checked_is_where_every_worker_connects(
    tmp_path: Path, names: dict[str, str]
) -> None:
    changes, here, elsewhere = str(tmp_path / "changes"), FakeFleet({}), FakeFleet({})
    async with memory_router(here, admin_key="operator", changes_file=changes) as router:
        await router.post("/admin/shards", {"address": "b:2"}, **KEY)
        await router.post("/admin/shards", {"address": "10.0.0.3:3"}, **KEY)
    names["b"] = "169.254.169.254"
    Changes(elsewhere, changes).say("remove", "fake:1")
    for fleet in (here, elsewhere):
        assert fleet.located == {"b:2": [ip_address("10.0.0.2")], "10.0.0.3:3": []}


async def _missing(router: MemoryRouter, method: str, path: str) -> str:
    answer = await router.request(method, path, headers=KEY)
    assert answer.status == 404
    message: str = json.loads(answer.body)["error"]["message"]
    return message


async def test_a_shard_that_is_not_there_is_named() -> None:
    async with memory_router(FakeFleet({}), admin_key="operator") as router:
        assert await _missing(router, "DELETE", "/admin/shards/b:2") == "b:2 is not in this fleet"
        assert "b:2" in await _missing(router, "POST", "/admin/shards/b:2/drain")


def test_what_one_worker_is_told_the_others_hear_also_those_that_start_later(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "changes")
    fleets = [FakeFleet({}) for _ in range(3)]
    first, second = (Changes(fleet, path) for fleet in fleets[:2])
    first.say("add", "b:2")
    second.say("remove", "fake:1")
    first.say("add", "c:3")
    second.say("remove", "nobody:9")
    third = Changes(fleets[2], path)
    third.say("remove", "b:2")
    first.say("add", "d:4")
    second.say("add", "e:5")
    assert _shards(fleets[1]) == ["c:3", "d:4", "e:5"]
    third.say("add", "f:6")
    assert _shards(fleets[2]) == ["c:3", "d:4", "e:5", "f:6"]


async def test_a_shard_is_the_same_however_its_address_is_written() -> None:
    async with memory_router(FakeFleet({}), admin_key="operator") as router:
        await router.post("/admin/shards", {"address": "[0:0::1]:50051"}, **KEY)
        assert _shards(router.fleet) == ["fake:1", "[::1]:50051"]
        for written in ("FAKE:1", "%5B::1%5D%3A50051"):
            answer = await router.request("DELETE", f"/admin/shards/{written}", headers=KEY)
            assert answer.status == 202
        assert _shards(router.fleet) == []
        answer = await router.request("DELETE", "/admin/shards/nowhere", headers=KEY)
        assert (answer.status, "is not HOST:PORT" in answer.error["message"]) == (400, True)


class HungShard(FakeShard):
    async def drain(self) -> None:
        await asyncio.Event().wait()


async def test_a_shard_that_does_not_answer_keeps_no_operator_waiting() -> None:
    fleet = FakeFleet({}, members=[HungShard()])
    async with memory_router(fleet, admin_key="operator", stall_timeout_s=0.05) as router:
        async with asyncio.timeout(30):
            answer = await router.request("POST", "/admin/shards/fake:1/drain", headers=KEY)
        message = "fake:1 does not drain: it does not answer"
        assert (answer.status, answer.error["message"]) == (503, message)


async def test_a_worker_that_starts_again_leaves_out_what_its_source_names_later(
    tmp_path: Path,
) -> None:
    path = tmp_path / "changes"
    path.write_text("remove b:2\nremove c:3\nadd c:3\nremove d:")
    fleet = FakeFleet({})
    following = asyncio.create_task(Changes(fleet, str(path)).follow())
    await asyncio.sleep(0.01)
    assert _shards(fleet) == ["fake:1", "c:3"]
    for address in ("b:2", "d:4"):
        fleet.add(address)
    with path.open("a") as file:
        file.write("4\n")
    async with asyncio.timeout(30):
        while _shards(fleet) != ["fake:1", "c:3"]:
            await asyncio.sleep(0.01)
    # Whoever comes back by the source's word stays.
    fleet.add("b:2")
    await asyncio.sleep(0.6)
    assert _shards(fleet) == ["fake:1", "c:3", "b:2"]
    following.cancel()
