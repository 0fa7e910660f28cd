"""Real shards report the pieces of prefixes that they hold, and fleets choose shards by them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from support.processes import Shard, running

from penstock_client import Fleet, GenerationRequest, SamplingParams, ShardState
from penstock_proto.prefix_hash import Tier, piece_names, root_hash

_FLAGS = ("--step-ms", "1", "--block-size", "16", "--kv-host-bytes", "4M")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Shard]]:
    folder = tmp_path_factory.mktemp("shards")
    made = [Shard(folder / f"log{number}", *_FLAGS) for number in range(2)]
    with running(*made):
        yield made


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.02)


async def _ask(fleet: Fleet, prompt: list[int], salt: str = "") -> tuple[str, int]:
    """Return the shard that answered, and the number of prompt tokens that it had cached."""
    request = GenerationRequest(
        prompt, SamplingParams(seed=1), max_tokens=4, ignore_eos=True, cache_salt=salt
    )
    cached = 0
    async with fleet.submit(request) as stream:
        async for output in stream:
            cached = max(cached, output.cached_tokens or 0)
    return stream.attempts[-1].shard, cached


def _tiers(state: ShardState, prompt: list[int], salt: str = "") -> list[int]:
    assert state.info is not None
    names = piece_names(root_hash(state.info.weights_hash, salt), prompt, state.info.block_size)
    return [state.pieces.told.tier(name) for name in names]


def _prompt(start: int, count: int = 600) -> list[int]:
    return [start + i % 89 for i in range(count)]


def _fleet(shards: list[Shard], policy: str = "prefix-affinity") -> Fleet:
    return Fleet([shard.address for shard in shards], policy=policy)


async def _ready(fleet: Fleet) -> None:
    await _until(lambda: all(state.ready for state in fleet.shards))


async def test_what_a_shard_computed_is_known_to_other_routers_and_to_later_ones(
    shards: list[Shard],
) -> None:
    prompt = _prompt(100)
    async with _fleet(shards) as first, _fleet(shards) as second:
        await _ready(first)
        await _ready(second)
        address, cached = await _ask(first, prompt)
        assert cached == 0
        holder = next(state for state in second.shards if state.address == address)
        await _until(lambda: _tiers(holder, prompt) == [Tier.DEVICE] * 4)
        for state in second.shards:
            if state is not holder:
                assert set(_tiers(state, prompt)) == {Tier.GONE}
        assert await _ask(second, prompt) == (address, 592)
    # Least load alone would take the first of the two: the one that does not hold this.
    other = [shard for shard in shards if shard.address != address]
    ordered = [*other, *(shard for shard in shards if shard.address == address)]
    async with _fleet(ordered) as restarted:
        await _ready(restarted)
        holder = next(state for state in restarted.shards if state.address == address)
        await _until(lambda: _tiers(holder, prompt) == [Tier.DEVICE] * 4)
        assert await _ask(restarted, prompt) == (address, 592)


async def test_salted_prefixes_are_told_by_names_that_only_who_knows_the_salt_can_name(
    shards: list[Shard],
) -> None:
    prompt = _prompt(300)
    async with _fleet(shards) as fleet:
        await _ready(fleet)
        address, _ = await _ask(fleet, prompt, "mine")
        holder = next(state for state in fleet.shards if state.address == address)
        await _until(lambda: _tiers(holder, prompt, "mine") == [Tier.DEVICE] * 4)
        assert set(_tiers(holder, prompt)) == {Tier.GONE}


async def test_a_new_engine_tells_what_host_memory_kept(shards: list[Shard]) -> None:
    prompt = _prompt(500)
    async with _fleet(shards[:1]) as fleet:
        await _ready(fleet)
        (state,) = fleet.shards
        for _ in range(2):
            await _ask(fleet, prompt)
        await _until(lambda: _tiers(state, prompt) == [Tier.DEVICE] * 4)
        before = state.pieces.instance_id
        shards[0].engine.kill()
        await _until(lambda: state.ready and state.pieces.instance_id != before)
        await _until(lambda: _tiers(state, prompt) == [Tier.HOST] * 4)
