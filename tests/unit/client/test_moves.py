"""Streams that leave their shard: their KV blocks go before them, where that can be."""

from __future__ import annotations

import asyncio

import pytest
from support.fleet_doubles import Make, World, settled

from penstock_client import (
    FinishReason,
    GenerationRequest,
    LoadReport,
    Output,
    ShardState,
    ShardUnavailable,
)
from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.placement import moves
from penstock_client.load_balancing.base import Candidate
from penstock_client.load_balancing.prefix_affinity import PrefixAffinity

_LONG = list(range(1, 201))
_PEERS = frozenset({"prefetch"})


def _world(make: Make, *names: str) -> World:
    """Shards that are peers."""
    world = make()
    for name in names:
        world.add(name, capabilities=_PEERS)
    return world


def _running(world: World, num_streams: int = 1) -> list[FleetStream]:
    """Start streams that have given a token each."""
    streams = [world.start(prompt_token_ids=_LONG, max_tokens=50) for _ in range(num_streams)]
    for stream in streams:
        stream.feed(Output([10], 0))
    return streams


def _answer(asked: asyncio.Future[int], answer: Exception | int) -> None:
    if isinstance(answer, int):
        asked.set_result(answer)
    else:
        asked.set_exception(answer)


async def _arrive(world: World, stream: FleetStream, name: str, index: int = 0) -> None:
    """Have the blocks of a stream arrive at a shard, and then its next token."""
    world.at(name).prefetches[index][2].set_result(200)
    await settled()
    stream.feed(Output([99], stream.num_tokens))
    await settled()


async def _drain(world: World, name: str) -> None:
    world.shards[name].load = LoadReport(serving=True, draining=True, handing_over=True)
    world.continuations.on_shard_change(world.shards[name])
    await settled()


async def test_a_stream_goes_on_where_it_runs_until_its_blocks_are_where_it_goes(
    make: Make,
) -> None:
    world = _world(make, "a")
    (stream,) = _running(world)
    world.add("b", capabilities=_PEERS)
    await _drain(world, "a")
    request, attempt, answer = world.at("b").prefetches[0]
    assert (attempt.kv_source, list(request.output_token_ids)) == ("a", [10])
    stream.feed(Output([11], 1))
    assert world.where(stream) == "a"
    answer.set_result(200)
    await settled()
    # It moves when it loses least.
    assert world.where(stream) == "a"
    stream.feed(Output([12], 2))
    await settled()
    assert (world.where(stream), world.at("a").detached) == ("b", [0])
    sent = world.last(stream)
    assert (sent.attempt.kv_source, list(sent.request.output_token_ids)) == ("a", [10, 11, 12])
    assert world.events[-2:] == [("moved", "drain"), ("sent", "only")]


async def test_of_each_attempt_it_is_known_what_was_cached_and_whose_blocks_it_had(
    make: Make,
) -> None:
    world = _world(make, "a")
    (stream,) = _running(world)
    world.add("b", capabilities=_PEERS)
    await _drain(world, "a")
    world.at("b").prefetches[0][2].set_result(200)
    await settled()
    stream.feed(Output([11], 1))
    await settled()
    stream.feed(Output([12], 2, cached_tokens=192))
    found = [(each.num_tokens, each.cached_tokens, each.kv_source) for each in stream.attempts]
    assert found == [(200, None, ""), (202, 192, "a")]


@pytest.mark.parametrize("answer", [ShardUnavailable("gone"), TimeoutError(), 10])
async def test_a_stream_moves_without_its_blocks_if_they_cannot_be_had(
    make: Make, answer: Exception | int
) -> None:
    world = _world(make, "a")
    (stream,) = _running(world)
    world.add("b", capabilities=_PEERS)
    await _drain(world, "a")
    _answer(world.at("b").prefetches[0][2], answer)
    await settled()
    assert world.where(stream) == "b"
    assert len(world.at("b").prefetches) == 1


async def test_one_of_which_no_token_comes_moves_a_while_after_its_blocks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "_NEXT_TOKEN_S", 0.02)
    world = _world(make, "a")
    (stream,) = _running(world)
    world.add("b", capabilities=_PEERS)
    await _drain(world, "a")
    world.at("b").prefetches[0][2].set_result(200)
    await asyncio.sleep(0.1)
    assert world.where(stream) == "b"


async def test_a_stream_does_not_wait_for_ever_for_its_blocks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "_MOST_S", 0.05)
    world = _world(make, "a")
    streams = _running(world, 5)
    world.add("b", capabilities=_PEERS)
    await _drain(world, "a")
    await asyncio.sleep(0.2)
    assert {world.where(stream) for stream in streams} == {"b"}


async def test_of_one_shard_the_blocks_of_two_streams_are_fetched_at_once(make: Make) -> None:
    world = _world(make, "a")
    streams = _running(world, 5)
    world.add("b", capabilities=_PEERS)
    await _drain(world, "a")
    for count in range(2, 6):
        assert len(world.at("b").prefetches) == count
        await _arrive(world, streams[count - 2], "b", count - 2)
    assert [world.where(stream) for stream in streams] == ["b"] * 4 + ["a"]
    await _arrive(world, streams[4], "b", 4)
    assert world.where(streams[4]) == "b"


async def test_a_stream_that_is_looked_at_again_is_fetched_once(make: Make) -> None:
    world = _world(make, "a")
    streams = _running(world, 5)
    world.add("b", capabilities=_PEERS)
    shard = world.shards["a"]
    shard.load = LoadReport(serving=True, draining=True, handing_over=True)
    for count in range(6):
        for _ in range(10):
            world.continuations.on_shard_change(shard)
            await asyncio.sleep(0)
        if count < len(streams):
            world.at("b").prefetches[count][2].set_result(200)
    assert len(world.at("b").prefetches) == len(streams)


async def test_a_shard_that_is_no_peer_is_told_to_fetch_nothing(make: Make) -> None:
    world = _world(make, "a")
    (stream,) = _running(world)
    world.add("b")
    await _drain(world, "a")
    assert (world.where(stream), world.at("b").prefetches) == ("b", [])


async def test_a_short_stream_moves_at_once(make: Make) -> None:
    world = _world(make, "a")
    stream = world.start()
    world.add("b", capabilities=_PEERS)
    await _drain(world, "a")
    assert (world.where(stream), world.at("b").prefetches) == ("b", [])


async def test_what_ends_meanwhile_is_not_fetched_further(make: Make) -> None:
    world = _world(make, "a")
    ends, leaves = _running(world, 2)
    world.add("b", capabilities=_PEERS)
    await _drain(world, "a")
    answers = [answer for _, _, answer in world.at("b").prefetches]
    ends.feed(Output([11], 1, finish_reason=FinishReason.LENGTH))
    leaves.cancel()
    await settled()
    assert all(answer.cancelled() for answer in answers)
    assert world.at("b").sent == []


async def test_one_whose_shard_dies_meanwhile_goes_on_at_once(make: Make) -> None:
    world = _world(make, "a")
    (stream,) = _running(world)
    world.add("b", capabilities=_PEERS)
    await _drain(world, "a")
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert world.where(stream) == "b"
    assert world.at("b").prefetches[0][2].cancelled()
    await settled()
    assert len(world.at("b").sent) == 1


async def test_one_whose_blocks_went_to_a_shard_that_is_gone_goes_elsewhere(make: Make) -> None:
    world = _world(make, "a")
    (stream,) = _running(world)
    world.add("b", capabilities=_PEERS)
    await _drain(world, "a")
    world.add("c", capabilities=_PEERS)
    world.shards["b"].load = LoadReport(serving=False)
    await _arrive(world, stream, "b")
    assert world.where(stream) == "c"


# ---- roles ----


def _roles(make: Make, **roles: str) -> World:
    world = make(prefill_tokens=100)
    for name, role in roles.items():
        world.add(name, role=role, capabilities=_PEERS)
    return world


class _Knowing(PrefixAffinity):
    """Knows how much of any prompt a shard holds."""

    held = 0

    def held_tokens(self, candidate: Candidate, request: GenerationRequest) -> int:
        return self.held if candidate.address == "d" else 0


@pytest.mark.parametrize(("held", "where"), [(100, "p"), (101, "d")])
async def test_what_other_shards_hold_of_a_prompt_does_not_count_as_long(
    make: Make, held: int, where: str
) -> None:
    policy = _Knowing()
    policy.held = held
    world = make(prefill_tokens=100, policy=policy)
    world.add("p", role="prefill", capabilities=_PEERS)
    world.add("d", role="decode", capabilities=_PEERS)
    assert world.where(world.start(prompt_token_ids=_LONG)) == where


def _at(world: World, stream: FleetStream) -> ShardState:
    assert stream.shard is not None
    return stream.shard


async def test_a_long_prompt_is_computed_on_a_prefill_shard_and_goes_on_at_another(
    make: Make,
) -> None:
    world = _roles(make, p="prefill", d="decode")
    stream = world.start(prompt_token_ids=_LONG)
    assert world.where(stream) == "p"
    await settled()
    assert world.at("d").prefetches == []
    stream.feed(Output([10], 0))
    await settled()
    _, attempt, _ = world.at("d").prefetches[0]
    assert (world.where(stream), attempt.kv_source) == ("p", "p")
    await _arrive(world, stream, "d")
    assert world.where(stream) == "d"
    assert ("moved", "role") in world.events
    stream.feed(Output([11], 2))
    await settled()
    assert world.where(stream) == "d"


async def test_a_short_prompt_is_sent_to_others_than_prefill_shards(make: Make) -> None:
    world = _roles(make, p="prefill", d="decode", x="both")
    where = set()
    for _ in range(4):
        stream = world.start(prompt_token_ids=_LONG[:99])
        where.add(world.where(stream))
        _at(world, stream).record_sent(50, 0.0)
    assert where == {"d", "x"}


async def test_where_one_kind_is_gone_the_other_serves(make: Make) -> None:
    only_prefill = _roles(make, p="prefill")
    short = only_prefill.start(prompt_token_ids=[1])
    assert only_prefill.where(short) == "p"
    only_decode = _roles(make, d="decode")
    long = only_decode.start(prompt_token_ids=_LONG)
    assert only_decode.where(long) == "d"


@pytest.mark.parametrize("answer", [ShardUnavailable("gone"), 90])
async def test_a_stream_whose_blocks_cannot_be_had_stays_at_its_prefill_shard(
    make: Make, answer: Exception | int
) -> None:
    world = _roles(make, p="prefill", d="decode")
    stream = world.start(prompt_token_ids=_LONG)
    stream.feed(Output([10], 0))
    await settled()
    _answer(world.at("d").prefetches[0][2], answer)
    await settled()
    stream.feed(Output([11], 1))
    await settled()
    assert (world.where(stream), len(world.at("d").prefetches)) == ("p", 1)


async def test_a_stream_at_a_prefill_shard_leaves_it_when_another_joins(make: Make) -> None:
    world = _roles(make, p="prefill")
    stream = world.start(prompt_token_ids=_LONG)
    stream.feed(Output([10], 0))
    await settled()
    world.continuations.on_shard_change(world.add("d", role="decode", capabilities=_PEERS))
    await settled()
    await _arrive(world, stream, "d")
    assert world.where(stream) == "d"


async def test_a_prefill_shard_that_drains_hands_over_also_to_others_of_its_kind(
    make: Make,
) -> None:
    world = _roles(make, p="prefill")
    stream = world.start(prompt_token_ids=_LONG)
    world.add("q", role="prefill", capabilities=_PEERS)
    await _drain(world, "p")
    await _arrive(world, stream, "q")
    assert world.where(stream) == "q"


async def test_one_that_is_to_be_computed_again_goes_to_a_prefill_shard_again(make: Make) -> None:
    world = _roles(make, p="prefill", d="decode", e="decode")
    stream = world.start(prompt_token_ids=_LONG)
    stream.feed(Output([10], 0))
    await settled()
    moved_to = "d" if world.at("d").prefetches else "e"
    await _arrive(world, stream, moved_to)
    assert world.where(stream) == moved_to
    world.shards[moved_to].load = LoadReport(serving=False)
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert world.where(stream) == "p"
