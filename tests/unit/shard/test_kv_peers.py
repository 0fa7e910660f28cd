"""Addresses that KV blocks are fetched from, and how long a harmful one is avoided."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from penstock_proto.types import PrefixNames
from penstock_shard.server.kv.peers import KvPeers
from penstock_shard.server.kv.transfers import Distrusted, FetchFailed

_PREFIX = PrefixNames(b"r" * 16, [b"d" * 16], bytes(64))


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were looked up; each stands for two addresses."""
    names: list[str] = []

    async def look_up(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        names.append(host)
        await asyncio.sleep(0)
        if host == "unknown":
            raise socket.gaierror("no such name")
        return [(None, None, None, "", (f"10.0.0.{number}", port)) for number in (1, 2)]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", look_up)
    return names


async def test_a_name_stands_for_all_its_addresses_on_its_port(looked_up: list[str]) -> None:
    peers = KvPeers(("shards:7000", "unknown:7000"), "key")
    assert await peers._is_peer("10.0.0.2:7000")
    assert not await peers._is_peer("10.0.0.2:7001")
    assert not await peers._is_peer("10.0.0.3:7000")
    assert await peers._is_peer("shards:7000")
    assert looked_up == ["shards", "unknown"]


async def test_who_comes_while_a_name_is_looked_up_waits_for_it(looked_up: list[str]) -> None:
    peers = KvPeers(("shards:7000",), "key")
    found = await asyncio.gather(*(peers._is_peer("10.0.0.1:7000") for _ in range(3)))
    assert found == [True] * 3
    assert looked_up == ["shards"]


async def test_names_are_looked_up_again_after_a_while(looked_up: list[str]) -> None:
    now_s = 0.0
    peers = KvPeers(("shards:7000",), "key", clock=lambda: now_s)
    await peers._is_peer("10.0.0.9:7000")
    now_s = 31.0
    await peers._is_peer("10.0.0.9:7000")
    assert looked_up == ["shards", "shards"]


async def test_a_name_that_no_host_can_have_stands_for_nothing() -> None:
    peers = KvPeers(("a..b:1", "127.0.0.2:1"), "key")
    with pytest.raises(FetchFailed, match="it is not among --kv-peers"):
        await anext(peers.fetch("127.0.0.1:1", b"n", _PREFIX, 0))


async def test_a_stranger_is_not_called() -> None:
    peers = KvPeers(("127.0.0.1:1",), "key")
    with pytest.raises(FetchFailed, match="it is not among --kv-peers"):
        await anext(peers.fetch("127.0.0.1:2", b"n", _PREFIX, 0))
    assert not peers._channels


async def test_after_harm_nothing_is_fetched_for_ten_minutes() -> None:
    now_s = 100.0
    peers = KvPeers(("127.0.0.1:1",), "key", clock=lambda: now_s)
    with pytest.raises(Distrusted):
        peers.distrust("127.0.0.1:1", "a block came that is damaged")
    peers.note_late("127.0.0.1:1")
    for later_s in (101.0, 699.0):
        now_s = later_s
        with pytest.raises(FetchFailed, match="it failed a short while ago"):
            await anext(peers.fetch("127.0.0.1:1", b"n", _PREFIX, 0))
    now_s = 701.0
    with pytest.raises(FetchFailed, match="UNAVAILABLE"):
        await anext(peers.fetch("127.0.0.1:1", b"n", _PREFIX, 0))
    await peers.close()
