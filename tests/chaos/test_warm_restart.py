"""The prefix cache survives the death of an engine, and gives the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
from support.budget import budget
from support.processes import Shard, running

from penstock_client import GenerationRequest, SamplingParams, ShardClient, ShardUnavailable

_LENGTH = 320
_COUNT = budget(40, 500)


async def _ask(client: ShardClient, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens of an answer, and the number of prompt tokens that were cached."""
    tokens, cached = list[int](), 0
    async with client.submit(GenerationRequest(prompt, SamplingParams(seed=1), max_tokens=3)) as s:
        async for output in s:
            tokens += output.token_ids
            cached = output.cached_tokens or cached
    return tokens, cached


async def _ask_all(client: ShardClient, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Return the tokens of each answer, and the cached share of all prompt tokens."""
    answers = await asyncio.gather(*(_ask(client, prompt) for prompt in prompts))
    cached = sum(cached for _, cached in answers)
    return [tokens for tokens, _ in answers], cached / (len(prompts) * _LENGTH)


@pytest.mark.timeout(600)
async def test_an_engine_that_is_killed_leaves_the_next_one_its_prefix_cache(
    tmp_path: Path,
) -> None:
    rng = random.Random(5)
    # 20 blocks each: in the soak 10,000 of them.
    prompts = [[rng.randrange(1000) for _ in range(_LENGTH)] for _ in range(_COUNT)]
    shard = Shard(tmp_path / "log", "--step-ms", "1", "--kv-host-bytes", "16M")
    with running(shard):
        async with ShardClient(shard.address) as client:
            calm, cold = await _ask_all(client, prompts)
            again, warm = await _ask_all(client, prompts)
            assert (again, cold) == (calm, 0)
            assert warm > 0.9
            # Copies are made between steps, some at a time.
            await asyncio.sleep(1)
            # Twice: all that a busy machine had not copied yet is computed and copied meanwhile.
            for _ in range(2):
                instance_id = (await client.info()).instance_id
                shard.engine.kill()
                await _another_engine(client, instance_id)
                after, found = await _ask_all(client, prompts)
                assert after == calm
                assert found >= 0.95 * warm
    assert f"{_COUNT * 19} KV blocks of the engine before are found in host memory" in shard.log


async def _another_engine(client: ShardClient, instance_id: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ShardUnavailable):
                if (await client.info()).instance_id != instance_id:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.timeout(600)
async def test_a_shard_that_is_killed_leaves_the_next_one_what_is_on_disk(tmp_path: Path) -> None:
    rng = random.Random(6)
    prompts = [[rng.randrange(1000) for _ in range(_LENGTH)] for _ in range(_COUNT)]
    directory = str(tmp_path / "disk")
    flags = ["--step-ms", "20", "--kv-host-bytes", "16M"]
    flags += ["--kv-disk", directory, "--kv-disk-bytes", "64M"]
    calm, warm = list[list[int]](), 0.0
    for number in range(2):
        shard = Shard(tmp_path / f"log{number}", *flags)
        with running(shard):
            if number:
                second = Shard(tmp_path / "refused", *flags)
                assert second.process.wait(60) == 2
                assert f"--kv-disk {directory}" in second.log.splitlines()[-1]
                assert f"{_COUNT * 19} KV blocks are found on disk" in shard.log
            async with ShardClient(shard.address) as client:
                after, found = await _ask_all(client, prompts)
                if number:
                    assert after == calm
                    # A busy machine computes what takes longer to read than to compute.
                    assert found >= 0.3 * warm
                    return
                calm = after
                _, warm = await _ask_all(client, prompts)
                assert warm > 0.9
                # Copies are made between steps, and written by a thread.
                await asyncio.sleep(2)
                shard.process.kill()
                shard.process.wait()


@pytest.mark.timeout(600)
async def test_a_shard_that_ends_leaves_the_next_one_also_what_was_used_once(
    tmp_path: Path,
) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(1000) for _ in range(_LENGTH)] for _ in range(_COUNT)]
    flags = ["--step-ms", "1", "--check-integrity"]
    flags += ["--kv-disk", str(tmp_path / "disk"), "--kv-disk-bytes", "64M"]
    answers: list[tuple[list[list[int]], float]] = []
    # That of the first has room for few of them.
    for number, host_bytes in enumerate(("200K", "16M")):
        shard = Shard(tmp_path / f"log{number}", *flags, "--kv-host-bytes", host_bytes)
        with running(shard):
            async with ShardClient(shard.address) as client:
                answers.append(await _ask_all(client, prompts))
            assert shard.terminate() == 0
        assert "not all KV blocks" not in shard.log
    (calm, cold), (after, found) = answers
    assert (after, cold) == (calm, 0)
    # All was saved. What a busy machine reads no faster than it would be computed is computed.
    assert f"{_COUNT * 20} KV blocks are found on disk" in shard.log
    assert found > 0
