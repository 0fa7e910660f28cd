"""Faults of every kind strike a fleet, at once and in any order: no stream notices them, and none
is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from support.budget import seeded
from support.chaos import Proxy, Trouble, proxies
from support.processes import Shard, running
from support.streams import Whole, mixed_request, run_whole

from penstock_client import Fleet, GenerationRequest, Patience

VOCAB = 1000
READERS = 24
# The KV blocks are few, so that requests are put down and given back.
FLAGS = (
    *("--step-ms", "4", "--max-num-batched-tokens", "512", "--stall-timeout-s", "1"),
    *("--kv-blocks", "50", "--max-model-len", "600", "--check-integrity"),
)


class Storm:
    """Strikes shards, and what is between them and the fleet."""

    def __init__(
        self, folder: Path, shards: list[Shard], between: list[Proxy], fleet: Fleet, seed: int
    ) -> None:
        self._folder = folder
        self._shards = shards
        self._between = between
        self._fleet = fleet
        self._rng = random.Random(seed)

    async def strike(self) -> None:
        kinds: list[Callable[[int], Awaitable[None]]] = [
            *(self._kill_engine, self._trouble, self._trouble, self._stop),
            *(self._replace, self._leave_and_return),
        ]
        await self._rng.choice(kinds)(self._rng.randrange(len(self._shards)))

    def calm(self) -> None:
        for proxy in self._between:
            proxy.set(Trouble.NONE)
        for shard in self._shards:
            shard.process.send_signal(signal.SIGCONT)

    async def _kill_engine(self, index: int) -> None:
        # In a thread, as it may wait: while the shard's server is stopped, no new engine starts.
        engine = await asyncio.to_thread(lambda: self._shards[index].engine)
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()

    async def _trouble(self, index: int) -> None:
        proxy = self._between[index]
        proxy.set(self._rng.choice([Trouble.RESET, Trouble.HALF_OPEN, Trouble.DELAY]))
        self._later(proxy.set, Trouble.NONE)

    async def _stop(self, index: int) -> None:
        process = self._shards[index].process
        process.send_signal(signal.SIGSTOP)
        self._later(process.send_signal, signal.SIGCONT)

    async def _replace(self, index: int) -> None:
        """Drained, and another in its place."""
        shard = self._shards[index]
        shard.process.send_signal(signal.SIGCONT)
        port = int(shard.address.rpartition(":")[2])
        await asyncio.to_thread(shard.terminate, 40)
        self._shards[index] = Shard(self._folder / f"shard{index}", *FLAGS, port=port)
        await asyncio.to_thread(self._shards[index].wait_healthy)

    async def _leave_and_return(self, index: int) -> None:
        address = self._between[index].address
        if any(shard.address == address for shard in self._fleet.shards):
            self._fleet.remove(address)
            self._later(self._fleet.add, address)

    def _later(self, act: Callable[..., object], *args: object) -> None:
        asyncio.get_running_loop().call_later(self._rng.uniform(0.05, 3.0), act, *args)


class Readers:
    """Ask for the same requests again and again; some leave early."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self._fleet = fleet
        self._rng = rng
        self._requests = [mixed_request(rng, VOCAB) for _ in range(30)]
        self._calm: list[Whole] = []
        self.num_whole = 0

    async def begin(self) -> None:
        self._calm = [await run_whole(self._fleet, request) for request in self._requests]

    async def read(self, over: asyncio.Event) -> None:
        while not over.is_set():
            index = self._rng.randrange(len(self._requests))
            await self._ask(self._requests[index], self._calm[index])

    async def _ask(self, request: GenerationRequest, calm: Whole) -> None:
        if self._rng.random() < 0.25:
            try:
                async with asyncio.timeout(self._rng.uniform(0.0, 0.6)):
                    await run_whole(self._fleet, request)
            except TimeoutError:
                return
        else:
            assert await run_whole(self._fleet, request) == calm, request
            self.num_whole += 1


async def _all_ready(fleet: Fleet, count: int) -> None:
    async with asyncio.timeout(60):
        while sum(shard.ready for shard in fleet.shards) < count:
            await asyncio.sleep(0.05)


async def _nothing_left(fleet: Fleet) -> None:
    """Wait until no request is left, neither in the fleet nor at a shard."""
    async with asyncio.timeout(30):
        while any(
            shard.in_flight or shard.load.running or shard.load.waiting for shard in fleet.shards
        ):
            await asyncio.sleep(0.05)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["least-load", "prefix-affinity"])
async def test_streams_outlive_whatever_goes_wrong_at_once_and_leave_nothing(
    tmp_path: Path, request: pytest.FixtureRequest, policy: str
) -> None:
    rng = seeded(request.node.name)
    shards = [Shard(tmp_path / f"shard{index}", *FLAGS) for index in range(3)]
    patience = Patience(wait_s=60)
    with running(*shards):
        async with (
            proxies(*(shard.address for shard in shards)) as between,
            Fleet(
                [proxy.address for proxy in between],
                stall_timeout_s=1.5,
                patience=patience,
                policy=policy,
            ) as fleet,
        ):
            await _all_ready(fleet, len(shards))
            storm = Storm(tmp_path, shards, between, fleet, rng.getrandbits(32))
            readers, over = Readers(fleet, rng), asyncio.Event()
            await readers.begin()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(READERS):
                        tasks.create_task(readers.read(over))
                    for _ in range(60):
                        await asyncio.sleep(rng.uniform(0.1, 1.2))
                        await storm.strike()
                    # What was to end later has.
                    await asyncio.sleep(3.5)
                    storm.calm()
                    over.set()
                assert readers.num_whole > READERS
                await _all_ready(fleet, len(shards))
                await _nothing_left(fleet)
                assert not any("AssertionError" in shard.log for shard in shards)
            finally:
                storm.calm()
                for shard in shards:
                    shard.close()
