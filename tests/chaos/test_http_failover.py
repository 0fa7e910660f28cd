"""Over HTTP: what clients of a router see of shards that die, for every kind of answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from support.budget import budget, seeded
from support.http_answers import KINDS, WHOLE_ONLY, streamed, whole
from support.processes import Router, Shard, running, wait_until


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def _rounds(
    session: aiohttp.ClientSession, router: Router, shards: list[Shard], rng: random.Random, n: int
) -> None:
    jobs = [(whole, path, body) for path, body in KINDS + WHOLE_ONLY]
    jobs += [(streamed, path, body) for path, body in KINDS]
    calm = await asyncio.gather(
        *(ask(session, router.url + path, body) for ask, path, body in jobs)
    )
    for _ in range(n):
        tasks = [
            asyncio.create_task(ask(session, router.url + path, body)) for ask, path, body in jobs
        ]
        await asyncio.sleep(rng.uniform(0.02, 0.5))
        rng.choice(shards).engine.kill()
        for job, before, after in zip(jobs, calm, await asyncio.gather(*tasks), strict=True):
            assert after == before, job
        await asyncio.to_thread(
            wait_until, lambda: all(s.healthy() for s in shards), timeout_s=30, what="all healthy"
        )


async def test_answers_of_every_kind_are_the_same_when_engines_die(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    rng = seeded("answers_of_every_kind")
    flags = ("--step-ms", "5", "--max-num-batched-tokens", "512")
    shards = [Shard(tmp_path / f"shard{index}", *flags) for index in range(2)]
    router = Router(tmp_path / "router", [shard.address for shard in shards])
    with running(*shards, router):
        await asyncio.sleep(0.5)
        await _rounds(session, router, shards, rng, budget(1, 40))


@pytest.mark.soak
async def test_answers_of_a_real_model_are_the_same_when_engines_die(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    pytest.importorskip("torch")
    rng = seeded("answers_of_a_real_model")
    flags = ("--runner", "model", "--threads", "1")
    shards = [Shard(tmp_path / f"shard{index}", *flags) for index in range(2)]
    router = Router(tmp_path / "router", [shard.address for shard in shards])
    with running(*shards, router):
        await asyncio.sleep(0.5)
        await _rounds(session, router, shards, rng, budget(1, 20))
