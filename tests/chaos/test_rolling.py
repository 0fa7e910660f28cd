"""Shards that are replaced one after another while requests arrive."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.budget import budget, seeded
from support.checkouts import REVISION_1, at_revision
from support.processes import Shard, running
from support.streams import Whole, any_request, run_whole

from penstock_client import Fleet, GenerationRequest

VOCAB = 1000
FAKE = ("--step-ms", "5", "--max-num-batched-tokens", "512")

Start = Callable[[int, int | None], Shard]


async def _all_ready(fleet: Fleet) -> None:
    async with asyncio.timeout(30):
        while not all(shard.ready for shard in fleet.shards):
            await asyncio.sleep(0.02)


def _without_window(request: GenerationRequest) -> GenerationRequest:
    sampling = dataclasses.replace(request.sampling, penalty_window_tokens=None)
    return dataclasses.replace(request, sampling=sampling)


class Rolling:
    """A fleet whose shards are replaced in place, under a steady stream of requests."""

    def __init__(self, shards: list[Shard], fleet: Fleet, rng: random.Random) -> None:
        self.shards = shards
        self.fleet = fleet
        made = [any_request(rng, VOCAB, max_tokens=100) for _ in range(40)]
        # Shards of the first revision do not serve windows.
        self.requests = [_without_window(request) for request in made]
        self.answers: list[tuple[GenerationRequest, asyncio.Task[Whole]]] = []
        self._rng = rng

    async def calm(self) -> list[Whole]:
        return await asyncio.gather(*(run_whole(self.fleet, r) for r in self.requests))

    async def replace_all(self, start: Start, *, rate: float) -> None:
        """SIGTERM to each in turn, and another in its place once it has exited with 0."""
        arriving = asyncio.create_task(self._arrive(rate))
        for index, shard in enumerate(self.shards):
            port = int(shard.address.rpartition(":")[2])
            assert await asyncio.to_thread(shard.terminate, 40) == 0
            self.shards[index] = start(index, port)
            await asyncio.to_thread(self.shards[index].wait_healthy)
            await _all_ready(self.fleet)
        arriving.cancel()

    async def _arrive(self, rate: float) -> None:
        while True:
            request = self._rng.choice(self.requests)
            task = asyncio.create_task(run_whole(self.fleet, request))
            self.answers.append((request, task))
            await asyncio.sleep(self._rng.expovariate(rate))

    async def check(self, *unbroken: Sequence[Whole]) -> None:
        """Check that every answer equals the one in an unbroken run."""
        assert len(self.answers) > 20
        for request, task in self.answers:
            index = self.requests.index(request)
            assert await task in [run[index] for run in unbroken], request

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return seeded(request.node.name)


@pytest.mark.soak
async def test_a_rolling_restart_is_not_noticed(tmp_path: Path, rng: random.Random) -> None:
    def start(index: int, port: int | None) -> Shard:
        return Shard(tmp_path / f"shard{index}", *FAKE, port=port)

    shards = [start(index, None) for index in range(budget(2, 4))]
    with running(*shards):
        async with Fleet([shard.address for shard in shards]) as fleet:
            await _all_ready(fleet)
            rolling = Rolling(shards, fleet, rng)
            try:
                calm = await rolling.calm()
                for _ in range(budget(1, 8)):
                    await rolling.replace_all(start, rate=budget(25, 50))
                await rolling.check(calm)
            finally:
                rolling.close()


async def test_an_upgrade_to_another_wire_revision_and_back_is_not_noticed(
    tmp_path: Path, rng: random.Random
) -> None:
    older = at_revision(REVISION_1, tmp_path / "revision1").python_path

    def start_older(index: int, port: int | None) -> Shard:
        return Shard(tmp_path / f"shard{index}", *FAKE, port=port, python_path=older)

    def start_newer(index: int, port: int | None) -> Shard:
        return Shard(tmp_path / f"shard{index}", *FAKE, port=port)

    shards = [start_older(index, None) for index in range(2)]
    with running(*shards):
        async with Fleet([shard.address for shard in shards]) as fleet:
            await _all_ready(fleet)
            assert fleet.info().schema_revision == 1
            rolling = Rolling(shards, fleet, rng)
            try:
                calm = await rolling.calm()
                await rolling.replace_all(start_newer, rate=20)
                assert fleet.info().schema_revision > 1
                await rolling.replace_all(start_older, rate=20)
                await rolling.check(calm)
            finally:
                rolling.close()


@pytest.mark.soak
async def test_an_upgrade_of_the_weights_gives_answers_of_the_old_or_of_the_new(
    tmp_path: Path, rng: random.Random
) -> None:
    def start_with(weights: str) -> Start:
        def start(index: int, port: int | None) -> Shard:
            return Shard(tmp_path / f"shard{index}", *FAKE, "--fake-weights", weights, port=port)

        return start

    shards = [start_with("old")(index, None) for index in range(2)]
    with running(*shards):
        async with Fleet([shard.address for shard in shards]) as fleet:
            await _all_ready(fleet)
            rolling = Rolling(shards, fleet, rng)
            try:
                old = await rolling.calm()
                await rolling.replace_all(start_with("new"), rate=30)
                new = await rolling.calm()
                assert all(a.token_ids != b.token_ids for a, b in zip(old, new, strict=True))
                await rolling.check(old, new)
            finally:
                rolling.close()
