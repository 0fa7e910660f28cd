"""Requests that wait at a shard while another has room."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from support.fleet_doubles import Make, World, settled

from penstock_client import LoadReport, Output
from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.placement import rebalancing

_PEERS = frozenset({"prefetch"})


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalancing, "_LOOK_INTERVAL_S", 0.02)


async def _looks() -> None:
    await asyncio.sleep(0.1)


def _report(world: World, name: str, running: int, waiting: int, blocks: int = 0) -> None:
    """Report the load of a shard; each prompt that waits there has three tokens."""
    load = LoadReport(
        serving=True,
        num_blocks=10,
        running=running,
        waiting=waiting,
        queued_prompt_tokens=3 * waiting,
        referenced_blocks=blocks,
    )
    world.shards[name].update_load(load)


async def _keep_running(streams: list[FleetStream]) -> None:
    for _ in range(25):
        for stream in streams:
            stream.feed(Output([11], stream.num_tokens))
        await asyncio.sleep(0.005)


async def test_what_waits_goes_to_a_shard_that_joins_the_newest_first(make: Make) -> None:
    world = make("a")
    streams = [world.start() for _ in range(10)]
    for stream in streams[:4]:
        stream.feed(Output([10], 0))
    _report(world, "a", 4, 6)
    world.add("b")
    await _keep_running(streams[:4])
    # It takes what makes it half as busy as the other was, and of those that wait only.
    assert [world.where(stream) for stream in streams] == ["a"] * 5 + ["b"] * 5
    assert [sent.stream for sent in world.at("b").sent] == streams[:4:-1]
    assert ("moved", "rebalance") in world.events
    assert streams[9].attempts[0].ended_because == "rebalance"
    assert world.at("a").detached == [0] * 5


async def test_those_that_run_stay(make: Make) -> None:
    world = make("a")
    streams = [world.start() for _ in range(4)]
    _report(world, "a", 2, 2)
    world.add("b")
    await _keep_running(streams)
    assert {world.where(stream) for stream in streams} == {"a"}


async def test_none_goes_where_others_wait_or_the_cache_is_full_or_the_work_is_as_much(
    make: Make,
) -> None:
    world = make("a")
    streams = [world.start() for _ in range(4)]
    _report(world, "a", 0, 4)
    world.add("b")
    for running, waiting, blocks in ((0, 1, 0), (0, 0, 6), (3, 0, 0)):
        _report(world, "b", running, waiting, blocks)
        await _looks()
    assert {world.where(stream) for stream in streams} == {"a"}
    # Nor once there would be room again, for less than it takes to look twice.
    _report(world, "a", 4, 0)
    _report(world, "b", 0, 0)
    await _looks()
    assert {world.where(stream) for stream in streams} == {"a"}


async def test_of_a_queue_that_clients_share_each_moves_its_share(make: Make) -> None:
    world = make("a")
    streams = [world.start() for _ in range(5)]
    # Of 20 requests there 15 are another client's, and 8 have been computed.
    _report(world, "a", 12, 8)
    world.add("b")
    while ("moved", "rebalance") not in world.events:
        await asyncio.sleep(0.001)
    _report(world, "a", 12, 0)
    await _looks()
    assert [world.where(stream) for stream in streams] == ["a"] * 3 + ["b"] * 2


async def test_a_stream_goes_so_only_once(make: Make) -> None:
    world = make("a")
    streams = [world.start() for _ in range(2)]
    _report(world, "a", 0, 2)
    world.add("b")
    await _looks()
    assert [world.where(stream) for stream in streams] == ["a", "b"]
    _report(world, "a", 0, 0)
    _report(world, "b", 0, 1)
    await _looks()
    assert world.where(streams[1]) == "b"


async def test_one_that_has_begun_goes_with_its_blocks(make: Make) -> None:
    world = make()
    world.add("a", capabilities=_PEERS)
    stream = world.start(prompt_token_ids=list(range(1, 201)), max_tokens=50)
    stream.feed(Output([10], 0))
    # Preempted: it waits again.
    _report(world, "a", 0, 1)
    world.shards["a"].load = dataclasses.replace(world.shards["a"].load, queued_prompt_tokens=201)
    world.add("b", capabilities=_PEERS)
    await _looks()
    assert world.where(stream) == "a"
    _, attempt, answer = world.at("b").prefetches[0]
    assert attempt.kv_source == "a"
    answer.set_result(200)
    await settled()
    stream.feed(Output([11], 1))
    await settled()
    assert (world.where(stream), world.last(stream).attempt.kv_source) == ("b", "a")


async def test_one_that_may_be_half_computed_stays(make: Make) -> None:
    world = make("a")
    streams = [world.start(prompt_token_ids=[1] * num_tokens) for num_tokens in (50, 30)]
    _report(world, "a", 2, 0)
    world.shards["a"].load = dataclasses.replace(world.shards["a"].load, queued_prompt_tokens=29)
    world.add("b")
    await _looks()
    assert {world.where(stream) for stream in streams} == {"a"}
    world.shards["a"].load = dataclasses.replace(world.shards["a"].load, queued_prompt_tokens=31)
    await _looks()
    assert [world.where(stream) for stream in streams] == ["a", "b"]


async def test_shards_without_streams_of_this_client_and_engines_that_start_are_looked_over(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make("a", "b", "c")
    stream = world.start(shard="a")
    _report(world, "a", 0, 3)
    for name in "bc":
        load = LoadReport(serving=name == "b", num_blocks=10, queued_prompt_tokens=5)
        world.shards[name].load = load
    world.shards["c"].info = None
    await _looks()
    assert (world.where(stream), caplog.text) == ("a", "")


async def test_one_that_must_run_where_it_waits_stays(make: Make) -> None:
    world = make("a")
    stream = world.start(shard="a")
    world.start(shard="a")
    _report(world, "a", 2, 2)
    world.add("b")
    await _looks()
    assert world.where(stream) == "a"
    # The look costs nothing more: it is chosen anew at each.
    assert not world.continuations._rebalancing.is_chosen(stream)
