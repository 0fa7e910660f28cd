"""A shard tells its callers which requests an engine's death is charged to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.processes import Shard, running

from penstock_client import (
    Attempt,
    GenerationRequest,
    GenerationStream,
    Overloaded,
    PenstockError,
    ShardClient,
    ShardUnavailable,
)

LONG = GenerationRequest([1, 2], max_tokens=1500, ignore_eos=True)


def _send(client: ShardClient, name: str, *, suspect: bool = False) -> GenerationStream:
    stream = GenerationStream(name, 0, 0, client.detach)
    client.attach(stream, LONG, Attempt(suspect=suspect))
    return stream


async def _end(stream: GenerationStream) -> PenstockError:
    with pytest.raises(PenstockError) as ended:
        async for _ in stream:
            pass
    return ended.value


async def _charged(client: ShardClient, shard: Shard, *, suspect: bool) -> list[bool]:
    """Kill the engine while two requests run and a third waits for a seat. Return, for each of the
    three, True if the death is charged to it.
    """
    streams = [_send(client, "first"), _send(client, "second", suspect=suspect)]
    for stream in streams:
        await anext(stream)
    streams.append(_send(client, "waits"))
    await asyncio.sleep(0.2)
    shard.engine.kill()
    errors = [await _end(stream) for stream in streams]
    assert [type(error) for error in errors] == [ShardUnavailable] * 3
    return [error.engine_died for error in errors if isinstance(error, ShardUnavailable)]


async def test_a_death_is_charged_to_those_that_ran_and_to_a_suspect_alone(tmp_path: Path) -> None:
    shard = Shard(tmp_path / "log", "--step-ms", "100", "--max-num-seqs", "2")
    with running(shard):
        async with ShardClient(shard.address) as client:
            assert await _charged(client, shard, suspect=False) == [True, True, False]
            await asyncio.to_thread(shard.wait_healthy)
            assert await _charged(client, shard, suspect=True) == [False, True, False]


async def _first_token_ids(client: ShardClient, name: str) -> Sequence[int]:
    """Return the token ids of the first output of a suspect. Send it again until the suspect
    before it is gone.
    """
    async with asyncio.timeout(30):
        while True:
            try:
                return (await anext(_send(client, name, suspect=True))).token_ids
            except Overloaded:
                await asyncio.sleep(0.05)


async def test_one_suspect_runs_at_a_time_whoever_sends_the_next(tmp_path: Path) -> None:
    shard = Shard(tmp_path / "log", "--step-ms", "100")
    with running(shard):
        async with ShardClient(shard.address) as one, ShardClient(shard.address) as other:
            first = _send(one, "first", suspect=True)
            await anext(first)
            error = await _end(_send(other, "second", suspect=True))
            assert isinstance(error, Overloaded)
            assert "is being tried" in str(error)
            first.cancel()
            assert await _first_token_ids(other, "third")
