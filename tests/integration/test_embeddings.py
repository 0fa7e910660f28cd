"""Embeddings of real shards (fake runner): over gRPC, through the client library and by hand."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from support.processes import Shard, running

from penstock_cli.info import main as info
from penstock_client import (
    EmbeddingRequest,
    Fleet,
    GenerationRequest,
    InvalidRequest,
    LoadReport,
    Overloaded,
    SamplingParams,
    ShardClient,
    ShardUnavailable,
    SyncShardClient,
)
from penstock_proto import shard_pb2 as pb
from penstock_proto.shard_pb2_grpc import ShardStub

SIZE = 64
FLAGS = ("--step-ms", "5", "--max-num-seqs", "16", "--max-num-batched-tokens", "128")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    service = Shard(tmp_path_factory.mktemp("shard") / "log", *FLAGS)
    with running(service):
        yield service


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    """A shard that runs one sequence at a time, and queues at most 10 requests."""
    flags = ("--step-ms", "10", "--max-num-seqs", "1", "--max-queued-requests", "10")
    service = Shard(tmp_path_factory.mktemp("narrow") / "log", *flags)
    with running(service):
        yield service


@pytest.fixture
async def client(shard: Shard) -> AsyncIterator[ShardClient]:
    async with ShardClient(shard.address) as client:
        yield client


async def load(client: ShardClient) -> LoadReport:
    reports = client.watch_load()
    try:
        return await anext(reports)
    finally:
        await reports.aclose()


async def wait_idle(client: ShardClient) -> None:
    async with asyncio.timeout(5):
        while (now := await load(client)).referenced_blocks or now.running or now.waiting:
            await asyncio.sleep(0.02)


def inputs(count: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(count)
    return [rng.choices(range(1000), k=rng.randint(1, longest)) for _ in range(count)]


async def test_vectors_are_the_same_whoever_asks_and_whatever_runs_beside(
    shard: Shard, client: ShardClient
) -> None:
    asked = EmbeddingRequest(inputs(30), pooling="mean")
    alone = [(await client.embed(EmbeddingRequest([ids], "mean")))[0] for ids in asked.inputs[:3]]
    stream = client.submit(GenerationRequest([1, 2], SamplingParams(seed=1), max_tokens=60))
    together = await client.embed(asked)
    assert (len(together), {len(vector) for vector in together}) == (30, {SIZE})
    assert together[:3] == alone
    assert sum([len(output.token_ids) async for output in stream]) == 60
    with SyncShardClient(shard.address) as blocking:
        assert await asyncio.to_thread(blocking.embed, asked) == together
    async with Fleet([shard.address]) as fleet:
        await fleet.wait_ready(5)
        unscaled = EmbeddingRequest(asked.inputs, "mean", normalize=False)
        assert await fleet.embed(unscaled) == together
    await wait_idle(client)


async def test_a_fleet_asks_for_what_the_model_is_made_for(shard: Shard) -> None:
    async with Fleet([shard.address]) as fleet:
        await fleet.wait_ready(5)
        defaults = fleet.info().embedding
        assert defaults is not None
        assert (defaults.pooling, defaults.normalize, defaults.size) == ("last", True, SIZE)
        assert "embed" in fleet.info().capabilities
        (vector,) = await fleet.embed(EmbeddingRequest([[1, 2, 3]], dimensions=10))
    assert len(vector) == 10
    assert math.hypot(*vector) == pytest.approx(1.0)


def test_info_shows_how_embeddings_are_made(
    shard: Shard, capsys: pytest.CaptureFixture[str]
) -> None:
    assert info([shard.address]) == 0
    assert "embeddings          64 values, last pooling, length 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (EmbeddingRequest([]), r"inputs: 0 inputs .* 1\.\.1024"),
        (EmbeddingRequest([[1], []]), r"inputs\[1\]: 0 tokens"),
        (EmbeddingRequest([[10**9]]), "inputs: 1000000000 .* vocabulary"),
        (EmbeddingRequest([[1]], dimensions=65), r"dimensions: 65 .* 1\.\.64"),
    ],
)
async def test_what_is_out_of_bounds_is_refused_with_its_bound(
    asked: EmbeddingRequest, reason: str, client: ShardClient
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await client.embed(asked)


def test_a_bad_request_ends_with_the_status_that_says_so(shard: Shard) -> None:
    with grpc.insecure_channel(shard.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            ShardStub(channel).Embed(pb.EmbedRequest(inputs=[pb.TokenIds()]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        wrong = pb.EmbedRequest(inputs=[pb.TokenIds(token_ids=[1])], instance_id="another")
        with pytest.raises(grpc.RpcError) as caught:
            ShardStub(channel).Embed(wrong)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_cancelled_call_frees_its_blocks(client: ShardClient) -> None:
    # None has a prefix that another one has computed.
    inputs = [[number] * 500 for number in range(1000)]
    call = asyncio.create_task(client.embed(EmbeddingRequest(inputs)))
    async with asyncio.timeout(20):
        while not (await load(client)).running:
            await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # To the end it would take 500,000 tokens at 128 in 5 ms: 20 s.
    async with asyncio.timeout(8):
        await wait_idle(client)


async def test_a_full_queue_refuses_a_call_and_leaves_nothing_behind(narrow: Shard) -> None:
    async with ShardClient(narrow.address) as client:
        with pytest.raises(Overloaded, match="--max-queued-requests 10"):
            await client.embed(EmbeddingRequest([[1] * 100] * 100))
        await wait_idle(client)
        assert len(await client.embed(EmbeddingRequest([[1]] * 10))) == 10


async def test_a_fleet_makes_elsewhere_what_a_killed_shard_did_not(
    shard: Shard, tmp_path: Path
) -> None:
    other = Shard(tmp_path / "log", *FLAGS)
    with running(other):
        async with Fleet([other.address, shard.address], stall_timeout_s=1.5) as fleet:
            while not all(state.ready for state in fleet.shards):
                await asyncio.sleep(0.02)
            asked = EmbeddingRequest(inputs(150, longest=400))
            # What is computed once is found again: the calm run is the second.
            call = asyncio.create_task(fleet.embed(asked))
            await asyncio.sleep(0.1)
            assert not call.done()
            other.engine.kill()
            assert await call == await fleet.embed(asked)


async def test_time_in_the_queue_is_told_apart_from_time_in_the_engine(narrow: Shard) -> None:
    async with ShardClient(narrow.address) as client:
        began_s = time.monotonic()
        first = client.submit(GenerationRequest([1], SamplingParams(seed=1), max_tokens=70))
        second = client.submit(GenerationRequest([2], SamplingParams(seed=1), max_tokens=4))
        outputs = [await anext(stream) for stream in (first, second)]
        took_s = time.monotonic() - began_s
    waited = [output.queue_s for output in outputs]
    assert waited[0] is not None
    assert waited[1] is not None
    # The steps of the one before it, which waited for none.
    assert 0.65 <= waited[1] < took_s
    assert waited[0] < waited[1] / 2


# The last one: its shard is not waited for.
async def test_a_killed_engine_ends_the_call_as_retryable(
    shard: Shard, client: ShardClient
) -> None:
    call = asyncio.create_task(client.embed(EmbeddingRequest([[7] * 500] * 100)))
    while not (await load(client)).running:
        await asyncio.sleep(0.01)
    shard.engine.kill()
    with pytest.raises(ShardUnavailable, match="engine died"):
        await call
