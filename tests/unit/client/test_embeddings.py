"""Embeddings over a fleet: who makes which vectors, and what happens when a shard does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from penstock_client import (
    EmbeddingRequest,
    Fleet,
    InvalidRequest,
    NoShardAvailable,
    NotServed,
    Overloaded,
    PenstockError,
    ShardUnavailable,
)
from penstock_proto import SCHEMA_REVISION
from penstock_proto import shard_pb2 as pb
from penstock_proto.shard_pb2_grpc import ShardServicer, add_ShardServicer_to_server


class Scripted(ShardServicer):
    """A shard whose vectors are [the first id, its own number]; or what `answer` does first."""

    def __init__(self, number: int, embeds: bool = True, weights: str = "w") -> None:
        self.number = number
        self.calls: list[pb.EmbedRequest] = []
        self.cancelled = 0
        self.answer: Callable[[Any], Awaitable[None]] | None = None
        self.server = grpc.aio.server()
        self.info = pb.InfoResponse(
            schema_revision=SCHEMA_REVISION,
            min_schema_revision=1,
            instance_id=f"engine{number}",
            model="model",
            weights_hash=weights,
            tokenizer_hash="t",
            max_model_len=100,
            vocab_size=1000,
            block_size=16,
            capabilities=["embed"] if embeds else [],
        )
        if embeds:
            self.info.embedding.pooling = pb.EmbedRequest.POOLING_MEAN
            self.info.embedding.normalize = True
            self.info.embedding.size = 2

    async def GetInfo(self, request, context):
        return self.info

    async def WatchLoad(self, request, context):
        while True:
            yield pb.LoadReport(instance_id=self.info.instance_id, serving=True, num_blocks=100)
            await asyncio.sleep(0.1)

    async def Embed(self, request, context):
        self.calls.append(request)
        try:
            if self.answer is not None:
                await self.answer(context)
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        vectors = [[each.token_ids[0], self.number] for each in request.inputs]
        return pb.EmbedResponse(embeddings=[pb.Embedding(values=values) for values in vectors])


def ends_as(status: grpc.StatusCode) -> Callable[[Any], Awaitable[None]]:
    async def answer(context: Any) -> None:
        await context.abort(status, "scripted")

    return answer


@asynccontextmanager
async def fleet_of(*shards: Scripted) -> AsyncIterator[Fleet]:
    addresses = []
    for shard in shards:
        add_ShardServicer_to_server(shard, shard.server)
        addresses.append(f"127.0.0.1:{shard.server.add_insecure_port('127.0.0.1:0')}")
        await shard.server.start()
    try:
        async with Fleet(addresses, stall_timeout_s=1.0) as fleet, asyncio.timeout(20):
            while not all(state.ready for state in fleet.shards):
                await asyncio.sleep(0.01)
            yield fleet
    finally:
        for shard in shards:
            await shard.server.stop(0)


def firsts(vectors: Sequence[Sequence[float]]) -> list[float]:
    return [vector[0] for vector in vectors]


async def test_many_inputs_are_cut_into_calls_over_all_shards_and_come_back_in_order() -> None:
    shards = [Scripted(0), Scripted(1)]
    inputs = [[number] * (1 + number % 7) for number in range(500)]
    async with fleet_of(*shards) as fleet:
        vectors = await fleet.embed(EmbeddingRequest(inputs))
    assert firsts(vectors) == list(range(500))
    calls = [call for shard in shards for call in shard.calls]
    assert all(1 <= len(call.inputs) <= 32 for call in calls)
    assert all(len(shard.calls) >= 4 for shard in shards)


async def test_long_inputs_go_fewer_to_a_call() -> None:
    shard = Scripted(0)
    shard.info.max_model_len = 20_000
    async with fleet_of(shard) as fleet:
        vectors = await fleet.embed(EmbeddingRequest([[1] * 9000, [2] * 9000, [3], [4] * 20_000]))
    assert firsts(vectors) == [1, 2, 3, 4]
    assert sorted(len(call.inputs) for call in shard.calls) == [1, 1, 2]


async def test_what_is_left_open_is_sent_as_the_model_has_it() -> None:
    shard = Scripted(0)
    async with fleet_of(shard) as fleet:
        await fleet.embed(EmbeddingRequest([[1]]))
        await fleet.embed(EmbeddingRequest([[1]], pooling="last", normalize=False, dimensions=1))
    own, asked = shard.calls
    assert (own.pooling, own.normalize) == (pb.EmbedRequest.POOLING_MEAN, True)
    assert (asked.pooling, asked.normalize, asked.dimensions) == (1, False, 1)
    assert own.instance_id == "engine0"


@pytest.mark.parametrize(
    "status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED]
)
async def test_what_one_shard_drops_another_makes(status: grpc.StatusCode) -> None:
    shards = [Scripted(0), Scripted(1)]
    shards[0].answer = ends_as(status)
    async with fleet_of(*shards) as fleet:
        vectors = await fleet.embed(EmbeddingRequest([[number] for number in range(200)]))
    assert vectors == [[number, 1] for number in range(200)]


async def test_what_is_on_a_shard_that_hangs_is_made_elsewhere() -> None:
    shards = [Scripted(0), Scripted(1)]

    async def hang(context: Any) -> None:
        hung.set()
        await asyncio.sleep(60)

    async with fleet_of(*shards) as fleet:
        hung = asyncio.Event()
        shards[0].answer = hang
        call = asyncio.create_task(fleet.embed(EmbeddingRequest([[n] for n in range(100)])))
        await hung.wait()
        state = next(s for s in fleet.shards if s.info and s.info.instance_id == "engine0")
        state.info = None
        fleet._shard_changed(state)
        assert firsts(await call) == list(range(100))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, ShardUnavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.FAILED_PRECONDITION, NotServed),
    ],
)
async def test_what_no_shard_makes_raises_the_clients_error(
    status: grpc.StatusCode, error: type[PenstockError]
) -> None:
    shards = [Scripted(number) for number in range(5)]
    for shard in shards:
        shard.answer = ends_as(status)
    async with fleet_of(*shards) as fleet:
        with pytest.raises(error, match="scripted"):
            await fleet.embed(EmbeddingRequest([[1]]))
    # An input that ends engines must not end them all.
    retried = error in (ShardUnavailable, Overloaded)
    assert sum(len(shard.calls) for shard in shards) == (3 if retried else 1)


async def test_a_cancelled_request_ends_its_calls() -> None:
    shard = Scripted(0)

    async def hang(context: Any) -> None:
        await asyncio.sleep(60)

    shard.answer = hang
    async with fleet_of(shard) as fleet:
        call = asyncio.create_task(fleet.embed(EmbeddingRequest([[1]] * 100)))
        while len(shard.calls) < 4:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while shard.cancelled < 4:
            await asyncio.sleep(0.01)
        assert fleet._embeddings.num_running(fleet.shards[0]) == 0


async def test_a_closed_fleet_ends_what_is_unfinished() -> None:
    shard = Scripted(0)

    async def hang(context: Any) -> None:
        await asyncio.sleep(60)

    shard.answer = hang
    async with fleet_of(shard) as fleet:
        call = asyncio.create_task(fleet.embed(EmbeddingRequest([[1]])))
        while not shard.calls:
            await asyncio.sleep(0.01)
        await fleet.close()
        with pytest.raises(ShardUnavailable):
            await call
        with pytest.raises(ShardUnavailable, match="closed"):
            await fleet.embed(EmbeddingRequest([[1]]))


async def test_only_shards_that_embed_are_asked_and_only_those_of_the_same_weights() -> None:
    plain, first, other = Scripted(0, embeds=False), Scripted(1), Scripted(2, weights="x")
    async with fleet_of(plain, first, other) as fleet:
        vectors = await fleet.embed(EmbeddingRequest([[number] for number in range(200)]))
    assert not plain.calls
    (number,) = {vector[1] for vector in vectors}
    assert number in (1, 2)
    assert [bool(shard.calls) for shard in (first, other)] == [number == 1, number == 2]


async def test_vectors_are_made_by_the_model_whose_own_name_is_asked_for() -> None:
    other, own = Scripted(0), Scripted(1)
    other.info.model = "other"
    other.info.model_aliases.append("model")
    async with fleet_of(other, own) as fleet:
        inputs = [[number] for number in range(200)]
        vectors = await fleet.embed(EmbeddingRequest(inputs, model="model"))
    assert {vector[1] for vector in vectors} == {1}
    assert not other.calls


async def test_a_fleet_that_cannot_embed_says_what_to_do() -> None:
    async with fleet_of(Scripted(0, embeds=False)) as fleet:
        with pytest.raises(NotServed, match="--embeddings"):
            await fleet.embed(EmbeddingRequest([[1]]))
        with pytest.raises(InvalidRequest, match="'other' is not served"):
            await fleet.embed(EmbeddingRequest([[1]], model="other"))
        with pytest.raises(NoShardAvailable, match="tokenizer"):
            await fleet.embed(EmbeddingRequest([[1]], tokenizer_hash="other"))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [([], "there are none"), ([[1]] * 40 + [[]], r"inputs\[40\]"), ([[1] * 101], "101 tokens")],
)
async def test_inputs_out_of_bounds_are_named_by_their_own_place(
    inputs: list[list[int]], reason: str
) -> None:
    shard = Scripted(0)
    async with fleet_of(shard) as fleet:
        with pytest.raises(InvalidRequest, match=reason):
            await fleet.embed(EmbeddingRequest(inputs))
    assert not shard.calls
