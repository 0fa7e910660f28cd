"""Requests outlive the shards they run on, and what they give is what the unbroken run gives."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.budget import budget, seeded
from support.chaos import Proxy, Trouble, proxies
from support.processes import Shard, running
from support.streams import Whole, mixed_request, run_whole

from penstock_client import (
    Fleet,
    GenerationRequest,
    NoShardAvailable,
    Patience,
    PoisonousRequest,
    SamplingParams,
    ShardUnavailable,
)

STREAMS = budget(20, 64)
VOCAB = 999
# In a prompt, it ends the engine.
POISON_ID = 999
FAKE = (
    *("--step-ms", "4", "--max-num-batched-tokens", "512", "--max-model-len", "9000"),
    *("--fake-crash-on", str(POISON_ID)),
)
SOON_STALLED = ("--stall-timeout-s", "1")
# Without a sign of life; shards give one each second.
FLEET_STALL_S = 1.5


def _shards(folder: Path, count: int, *flags: str) -> list[Shard]:
    return [Shard(folder / f"shard{index}", *FAKE, *flags) for index in range(count)]


@asynccontextmanager
async def _fleet(addresses: Sequence[str], **settings: object) -> AsyncIterator[Fleet]:
    async with Fleet(addresses, **settings) as fleet:  # type: ignore[arg-type]
        await _all_ready(fleet)
        yield fleet


def _addresses(shards: Sequence[Shard]) -> list[str]:
    return [shard.address for shard in shards]


async def _all_ready(fleet: Fleet) -> None:
    async with asyncio.timeout(30):
        while not all(shard.ready for shard in fleet.shards):
            await asyncio.sleep(0.02)


async def _run_all(fleet: Fleet, requests: Sequence[GenerationRequest]) -> list[Whole]:
    return await asyncio.gather(*(run_whole(fleet, request) for request in requests))


async def _rounds(
    fleet: Fleet,
    rounds: int,
    rng: random.Random,
    strike: Callable[[], Awaitable[None]],
    *,
    after_s: float = 0.3,
) -> None:
    """Strikes at a random moment of each round of 64 requests; every output is the calm run's."""
    for number in range(rounds):
        requests = [mixed_request(rng, VOCAB) for _ in range(STREAMS)]
        calm = await _run_all(fleet, requests)
        tasks = [asyncio.create_task(run_whole(fleet, request)) for request in requests]
        await asyncio.sleep(rng.uniform(0.01, after_s))
        await strike()
        for request, before, after in zip(
            requests, calm, await asyncio.gather(*tasks), strict=True
        ):
            assert after == before, f"round {number}: {request}"
        await _all_ready(fleet)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Shard]]:
    """Two shards. Each test leaves two that serve, perhaps others."""
    shards = _shards(tmp_path_factory.mktemp("pair"), 2)
    with running(*shards):
        yield shards
        for shard in shards:
            shard.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return seeded(request.node.name)


async def test_streams_of_every_kind_outlive_engines_that_are_killed(
    pair: list[Shard], rng: random.Random
) -> None:
    async with _fleet(_addresses(pair)) as fleet:

        async def strike() -> None:
            rng.choice(pair).engine.kill()

        await _rounds(fleet, budget(1, 180), rng, strike)


async def test_streams_outlive_whole_shards_that_are_killed(
    pair: list[Shard], rng: random.Random, tmp_path: Path
) -> None:
    async with _fleet(_addresses(pair)) as fleet:

        async def strike() -> None:
            victim = rng.randrange(2)
            port = int(pair[victim].address.rpartition(":")[2])
            pair[victim].close()
            pair[victim] = Shard(tmp_path / f"shard{victim}", *FAKE, port=port)

        await _rounds(fleet, budget(1, 20), rng, strike)


async def test_streams_outlive_an_engine_that_hangs_and_a_shard_that_hangs(
    tmp_path: Path, rng: random.Random
) -> None:
    shards = _shards(tmp_path, 2, *SOON_STALLED)
    with running(*shards):
        async with _fleet(_addresses(shards), stall_timeout_s=FLEET_STALL_S) as fleet:

            async def stop_an_engine() -> None:
                rng.choice(shards).engine.send_signal(signal.SIGSTOP)

            await _rounds(fleet, budget(1, 10), rng, stop_an_engine)
            victim = rng.choice(shards)

            async def stop_a_shard() -> None:
                for process in (victim.engine, victim.process):
                    process.send_signal(signal.SIGSTOP)
                asyncio.get_running_loop().call_later(
                    FLEET_STALL_S + 1.0,
                    lambda: [p.send_signal(signal.SIGCONT) for p in (victim.process, engine)],
                )

            for _ in range(budget(1, 10)):
                engine = victim.engine
                await _rounds(fleet, 1, rng, stop_a_shard)


@pytest.mark.parametrize("trouble", [Trouble.RESET, Trouble.HALF_OPEN, Trouble.DELAY])
async def test_streams_outlive_the_network(
    pair: list[Shard], rng: random.Random, trouble: Trouble
) -> None:
    # A fleet notices at once, or when it has heard nothing for long enough.
    lasts_s = FLEET_STALL_S + 1.0 if trouble is Trouble.HALF_OPEN else 0.5
    async with (
        proxies(*_addresses(pair)) as between,
        _fleet([proxy.address for proxy in between], stall_timeout_s=FLEET_STALL_S) as fleet,
    ):

        async def strike() -> None:
            proxy: Proxy = rng.choice(between)
            proxy.set(trouble)
            asyncio.get_running_loop().call_later(lasts_s, proxy.set, Trouble.NONE)

        await _rounds(fleet, budget(1, 10), rng, strike)


@pytest.mark.soak
async def test_streams_outlive_two_shards_that_die_at_once_and_the_last_one(
    tmp_path: Path, rng: random.Random
) -> None:
    shards = _shards(tmp_path, 3)
    with running(*shards):
        async with _fleet(_addresses(shards)) as fleet:

            async def strike_two() -> None:
                for shard in rng.sample(shards, 2):
                    shard.engine.kill()

            async def strike_all() -> None:
                for shard in shards:
                    shard.engine.kill()

            await _rounds(fleet, budget(1, 10), rng, strike_two)
            await _rounds(fleet, budget(1, 10), rng, strike_all)


async def test_requests_wait_for_the_last_shard_up_to_their_patience_and_are_told(
    pair: list[Shard], tmp_path: Path
) -> None:
    shard = pair[0]
    async with _fleet([shard.address], patience=Patience(wait_s=1.0)) as fleet:
        request = GenerationRequest([1], SamplingParams(seed=1), max_tokens=2000, ignore_eos=True)
        tasks = [asyncio.create_task(run_whole(fleet, request)) for _ in range(8)]
        await asyncio.sleep(0.3)
        shard.close()
        started_s = time.monotonic()
        # A third of the patience they would have had.
        async with asyncio.timeout(20):
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} == {NoShardAvailable}
        assert time.monotonic() - started_s > 0.9
    pair[0] = Shard(tmp_path / "again", *FAKE)


async def test_one_poisonous_request_ends_three_engines_at_most_and_no_other_request(
    pair: list[Shard], rng: random.Random
) -> None:
    async with _fleet(_addresses(pair)) as fleet:
        # Those that ran beside it go on alone, one at a time.
        requests = [mixed_request(rng, VOCAB) for _ in range(budget(8, 64))]
        calm = await _run_all(fleet, requests)
        before = _deaths(pair)
        tasks = [asyncio.create_task(run_whole(fleet, request)) for request in requests]
        poison = GenerationRequest([1, POISON_ID], SamplingParams(seed=1), max_tokens=50)
        with pytest.raises(PoisonousRequest, match="3 engines died"):
            await run_whole(fleet, poison)
        assert await asyncio.gather(*tasks) == calm
        await _all_ready(fleet)
        assert _deaths(pair) - before == 3
        with pytest.raises(PoisonousRequest, match="refused for another"):
            fleet.submit(poison)


def _deaths(shards: Sequence[Shard]) -> int:
    """Count the deaths of engines that the shards have logged."""
    return sum(shard.log.count("the engine died") for shard in shards)


@pytest.mark.soak
async def test_those_beside_a_poisonous_request_in_every_engine_that_died_need_not_queue_for_long(
    tmp_path: Path, rng: random.Random
) -> None:
    shards = _shards(tmp_path, 2)
    with running(*shards):
        # One after the other, whole, they would take most of a minute.
        patience = Patience(wait_s=20.0)
        async with _fleet(_addresses(shards), patience=patience) as fleet:
            requests = [mixed_request(rng, VOCAB, max_tokens=400) for _ in range(STREAMS)]
            calm = await _run_all(fleet, requests)
            tasks = [asyncio.create_task(run_whole(fleet, request)) for request in requests]
            await asyncio.sleep(0.3)
            poison = GenerationRequest([1, POISON_ID], SamplingParams(seed=1), max_tokens=50)
            with pytest.raises(PoisonousRequest, match="3 engines died"):
                await run_whole(fleet, poison)
            assert await asyncio.gather(*tasks) == calm


async def _until_all_arrived(fleet: Fleet) -> None:
    """Wait until each shard has reported all requests that the fleet has sent to it."""
    await asyncio.sleep(0.2)
    async with asyncio.timeout(30):
        while any(
            shard.load.running + shard.load.waiting < shard.in_flight for shard in fleet.shards
        ):
            await asyncio.sleep(0.02)


async def test_a_drained_shard_hands_its_requests_over_and_exits_at_once(
    pair: list[Shard], tmp_path: Path, rng: random.Random
) -> None:
    # Would take half a minute, far longer than a process takes to end.
    long = [
        GenerationRequest([1], SamplingParams(seed=seed), max_tokens=8000, ignore_eos=True)
        for seed in range(8)
    ]
    events: list[tuple[str, str]] = []
    observe = lambda event, reason: events.append((event, reason))  # noqa: E731
    # None is silent for so long, however busy the machine is.
    async with _fleet(_addresses(pair), stall_timeout_s=30.0, observe=observe) as fleet:
        requests = [mixed_request(rng, VOCAB, max_tokens=200) for _ in range(STREAMS)]
        calm = await _run_all(fleet, requests)
        lasting = [asyncio.create_task(run_whole(fleet, request)) for request in long]
        await asyncio.sleep(0.1)
        held = fleet.shards[0].in_flight
        tasks = [asyncio.create_task(run_whole(fleet, request)) for request in requests]
        # Those that reach it only after that are refused, and go on as after a failure.
        await _until_all_arrived(fleet)
        assert await asyncio.to_thread(pair[0].terminate) == 0
        # It waited for none of them; each was taken elsewhere before it was dropped.
        assert not any(task.done() for task in lasting)
        assert events.count(("moved", "drain")) >= held > 0
        assert "continued" not in {event for event, _ in events}
        assert await asyncio.gather(*tasks) == calm
        for task in lasting:
            task.cancel()
        await asyncio.gather(*lasting, return_exceptions=True)
    pair[0] = Shard(tmp_path / "again", *FAKE)


@pytest.mark.soak
async def test_a_drained_shard_finishes_what_no_other_can_go_on_with(tmp_path: Path) -> None:
    old = Shard(tmp_path / "old", *FAKE, "--fake-weights", "old")
    new = Shard(tmp_path / "new", *FAKE, "--fake-weights", "new")
    with running(old, new):
        async with _fleet([old.address, new.address]) as fleet:
            request = GenerationRequest(
                [1], SamplingParams(seed=1), max_tokens=300, shard=old.address
            )
            calm = await run_whole(fleet, request)
            task = asyncio.create_task(run_whole(fleet, request))
            await asyncio.sleep(0.3)
            assert await asyncio.to_thread(old.terminate) == 0
            assert await task == calm


async def test_a_request_meant_for_an_engine_that_is_gone_is_not_served_by_the_next_one(
    pair: list[Shard],
) -> None:
    from penstock_client import Attempt, GenerationStream, ShardClient

    # The other may have been started just now.
    async with ShardClient(pair[1].address) as client:
        stream = GenerationStream("mine", 0, 0, client.detach)
        request = GenerationRequest([1], max_tokens=3)
        client.attach(stream, request, Attempt(instance_id="another"))
        with pytest.raises(ShardUnavailable, match="this is another"):
            await anext(stream)


@pytest.mark.soak
async def test_a_shard_out_of_blocks_gives_a_request_back_when_another_has_room(
    tmp_path: Path, rng: random.Random
) -> None:
    small = Shard(tmp_path / "small", *FAKE, "--kv-blocks", "40", "--max-model-len", "600")
    large = Shard(tmp_path / "large", *FAKE, "--max-model-len", "600")
    with running(small, large):
        events: list[tuple[str, str]] = []
        observe = lambda event, reason: events.append((event, reason))  # noqa: E731
        async with _fleet(
            [small.address, large.address], policy="round-robin", observe=observe
        ) as fleet:
            requests = [mixed_request(rng, VOCAB, max_tokens=300) for _ in range(16)]
            calm = await _run_all(fleet, requests)
            assert ("continued", "unavailable") in events
            for request, whole in zip(requests, calm, strict=True):
                assert await run_whole(fleet, request) == whole
