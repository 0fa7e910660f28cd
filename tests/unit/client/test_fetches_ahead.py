"""KV blocks that are fetched before a session's next turn, as it would go to another shard."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from support.fleet_doubles import FIRST_CAPABILITIES, Make, World, info, settled

from penstock_client import FinishReason, LoadReport, Output, PenstockError, ShardUnavailable
from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.placement import fetches_ahead
from penstock_client.fleet.placement.fetches_ahead import FetchesAhead
from penstock_client.load_balancing.base import Policy
from penstock_client.load_balancing.least_load import LeastLoad
from penstock_client.load_balancing.prefix_affinity import PrefixAffinity

LONG = list(range(1, 401))
BUSY = LoadReport(serving=True, num_blocks=10, queued_prompt_tokens=50_000)


def ended(make: Make, policy: Policy | None = None) -> tuple[World, FleetStream, FetchesAhead]:
    """End a session's turn at shard a of two. Returns the world, the turn and its fetches ahead."""
    policy = PrefixAffinity() if policy is None else policy
    world = make(policy=policy)
    for name in ("a", "b"):
        world.add(name, capabilities=FIRST_CAPABILITIES | {"prefetch"})
    stream = world.start(prompt_token_ids=LONG, max_tokens=50, session="talk", model="m")
    assert world.where(stream) == "a"
    stream.feed(Output([7, 8], 0, finish_reason=FinishReason.STOP))
    fitting, events = world.continuations.fitting, world.events
    return world, stream, FetchesAhead(fitting, policy, lambda *event: events.append(event))


def next_turn(world: World) -> FleetStream:
    return world.start(prompt_token_ids=[*LONG, 7, 8, 9], session="talk", model="m")


async def test_another_shard_fetches_what_the_next_turn_begins_with_when_too_much_waits(
    make: Make,
) -> None:
    world, stream, ahead = ended(make)
    world.shards["a"].update_load(BUSY)
    ahead.follow(stream, world.shards["a"], 0.01)
    await settled()
    assert not world.at("b").prefetches
    await asyncio.sleep(0.05)
    ((request, attempt, answer),) = world.at("b").prefetches
    assert list(request.prompt_token_ids) == [*LONG, 7, 8]
    assert attempt.kv_source == "a"
    answer.set_result(384)
    await settled()
    assert ("fetched_ahead", "done") in world.events
    # The turn goes there, and is told who else has its blocks.
    turn = next_turn(world)
    assert world.where(turn) == "b"
    assert world.last(turn).attempt.kv_source == "a"
    ahead.close()


@pytest.mark.parametrize(
    "why",
    [
        *("stays", "holder gone", "engine gone", "policy", "far", "full", "no peer", "no adapter"),
        *("other weights", "turn came"),
    ],
)
async def test_nothing_is_fetched_where_it_would_be_of_no_use(
    make: Make, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, stream, ahead = ended(make, LeastLoad() if why == "policy" else None)
    holder = world.shards["a"]
    if why != "stays":
        holder.update_load(BUSY)
    if why == "holder gone":
        holder.update_load(LoadReport(serving=False))
    if why == "full":
        monkeypatch.setattr(fetches_ahead, "_MOST_TOKENS", 401)
    if why == "engine gone":
        holder.update_info(info("a"))
    if why == "no peer":
        world.add("b")
    if why == "no adapter":
        stream.request = dataclasses.replace(stream.request, adapter="mine")
    if why == "other weights":
        world.add("b", capabilities=FIRST_CAPABILITIES | {"prefetch"}, weights_hash="others")
    ahead.follow(stream, holder, 1000.0 if why == "far" else 0.0)
    if why == "turn came":
        ahead.forget("talk")
    await asyncio.sleep(0.02)
    assert not world.at("b").prefetches
    assert not world.at("a").prefetches
    ahead.close()


@pytest.mark.parametrize("fails", [True, False])
async def test_a_fetch_is_remembered_by_nothing_so_that_the_turn_is_placed_when_it_comes(
    make: Make, fails: bool
) -> None:
    world, stream, ahead = ended(make)
    world.shards["a"].update_load(BUSY)
    ahead.follow(stream, world.shards["a"], 0.0)
    await asyncio.sleep(0.02)
    error: PenstockError = ShardUnavailable("gone")
    answer = world.at("b").prefetches[0][2]
    if fails:
        answer.set_exception(error)
    else:
        answer.set_result(10)
    await settled()
    assert world.events[-1] == ("fetched_ahead", "failed" if fails else "done")
    assert not ahead._fetches
    assert not ahead._expected
    assert ahead._num_tokens == 0
    world.shards["a"].update_load(LoadReport(serving=True, num_blocks=10))
    assert world.where(next_turn(world)) == "a"
    ahead.close()


async def test_two_are_fetched_at_once_others_not_and_closing_ends_them(make: Make) -> None:
    world, stream, ahead = ended(make)
    world.shards["a"].update_load(BUSY)
    streams = [stream]
    for number in range(4):
        other = world.start(
            prompt_token_ids=[500 + number, *LONG], session=f"s{number}", model="m", shard=""
        )
        other.feed(Output([7], 0, finish_reason=FinishReason.STOP))
        streams.append(other)
    for each in streams:
        ahead.follow(each, world.shards[each.attempts[-1].shard], 0.0)
    # Of one session the last turn counts.
    ahead.follow(stream, world.shards["a"], 0.0)
    assert len(ahead._expected) == 5
    await asyncio.sleep(0.02)
    assert len(world.at("b").prefetches) <= 2
    assert len(ahead._fetches) == len(world.at("b").prefetches) > 0
    ahead.follow(stream, world.shards["a"], 5.0)
    ahead.close()
    await settled()
    assert not ahead._fetches
    assert not ahead._expected
    assert ahead._num_tokens == 0
