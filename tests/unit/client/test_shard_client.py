"""The shared call's bookkeeping, against a scripted shard in this process."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from penstock_client import (
    Fleet,
    GenerationRequest,
    InvalidRequest,
    NoShardAvailable,
    NotServed,
    PenstockError,
    ShardClient,
    ShardFailed,
    ShardUnavailable,
    SyncShardClient,
    Unauthenticated,
)
from penstock_client.rpc.shard_client import new_request_id
from penstock_proto import codec
from penstock_proto import shard_pb2 as pb
from penstock_proto.shard_pb2_grpc import ShardServicer, add_ShardServicer_to_server


class _Scripted(ShardServicer):
    """Answers each request with what its label names."""

    def __init__(self) -> None:
        self.aborts: list[tuple[str, int]] = []

    async def Generate(self, requests, context):
        async for request in requests:
            output = pb.Output(request_id=request.request_id, attempt=request.attempt)
            if request.label == "gap":
                output.first_position, output.token_ids[:] = 5, [9]
            elif request.label == "silent":
                continue
            elif request.label == "columns":
                # With a number that nobody has, as of an attempt that is over.
                numbers = [request.number + 1000, request.number, request.number]
                tokens = pb.Tokens(numbers=numbers, token_ids=[7, 8, 9], positions=[0, 0, 1])
                output.first_position, output.token_ids[:] = 2, [10]
                output.finish.reason = pb.Finish.REASON_STOP
                yield pb.GenerateResponse(tokens=tokens)
            elif request.label == "end the call":
                return
            elif request.label.startswith("break the call: "):
                status = grpc.StatusCode[request.label.rpartition(" ")[2]]
                await context.abort(status, "what Core says")
            else:
                output.token_ids[:] = [1]
                output.finish.reason = pb.Finish.REASON_STOP
            if request.label == "late":
                late = pb.Output(request_id=request.request_id, attempt=request.attempt - 1)
                late.error.code = grpc.StatusCode.UNAVAILABLE.value[0]
                yield pb.GenerateResponse(outputs=[late])
            yield pb.GenerateResponse(outputs=[output])

    async def Abort(self, request, context):
        self.aborts += zip(request.request_ids, request.attempts, strict=True)
        return pb.AbortResponse()


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[_Scripted, str]]:
    server = grpc.aio.server()
    servicer = _Scripted()
    add_ShardServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


def _request(label: str) -> GenerationRequest:
    return GenerationRequest([1], label=label)


async def test_tokens_in_columns_reach_the_attempt_with_their_number(
    scripted: tuple[_Scripted, str],
) -> None:
    _, address = scripted
    async with ShardClient(address) as client:
        streams = [client.submit(_request("columns")) for _ in range(3)]
        for stream in streams:
            assert [token async for output in stream for token in output.token_ids] == [8, 9, 10]
        assert client.in_flight == 0


async def test_an_end_of_a_lower_attempt_that_comes_late_ends_no_higher_one(
    scripted: tuple[_Scripted, str],
) -> None:
    async with ShardClient(scripted[1]) as client:
        stream = client.submit(_request("late"), request_id="r", attempt=1)
        assert [token async for output in stream for token in output.token_ids] == [1]


async def test_tokens_in_columns_of_a_lower_attempt_are_dropped(
    scripted: tuple[_Scripted, str],
) -> None:
    _, address = scripted
    async with ShardClient(address) as client:
        lower = client.submit(_request("silent"), request_id="r")
        call = client._call
        assert call is not None
        [old] = call._numbered
        higher = client.submit(_request("silent"), request_id="r", attempt=1)
        with pytest.raises(ShardUnavailable, match="higher attempt"):
            await anext(lower)
        await call._dispatch(
            pb.GenerateResponse(tokens=pb.Tokens(numbers=[old], token_ids=[7], positions=[0]))
        )
        assert higher.take() is None
        [new] = call._numbered
        await call._dispatch(
            pb.GenerateResponse(tokens=pb.Tokens(numbers=[new], token_ids=[8], positions=[0]))
        )
        output = higher.take()
        assert output is not None
        assert output.token_ids == [8]


async def test_readers_that_take_their_time_let_others_run(scripted: tuple[_Scripted, str]) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with ShardClient(scripted[1]) as client:
        for _ in range(40):
            # As long as a reader takes who makes text of many tokens.
            client.submit(_request("silent")).listen(lambda: time.sleep(0.001))
        call = client._call
        assert call is not None
        ids = list(call._numbered)
        counting = asyncio.create_task(count())
        tokens = pb.Tokens(numbers=ids, token_ids=ids, positions=[0] * len(ids))
        await call._dispatch(pb.GenerateResponse(tokens=tokens))
        counting.cancel()
        assert turns >= 30


async def test_numbers_of_attempts_begin_again_after_the_last(
    scripted: tuple[_Scripted, str],
) -> None:
    async with ShardClient(scripted[1]) as client:
        client.submit(_request("silent"))
        call = client._call
        assert call is not None
        call._numbers = itertools.count(2**32 - 1)
        for _ in range(3):
            stream = client.submit(_request("finish"))
            assert [token async for output in stream for token in output.token_ids] == [1]


async def test_a_gap_in_one_stream_ends_no_other(scripted: tuple[_Scripted, str]) -> None:
    servicer, address = scripted
    async with ShardClient(address) as client:
        gap, good = client.submit(_request("gap")), client.submit(_request("silent"))
        with pytest.raises(ShardFailed, match="position 5"):
            await anext(gap)
        later = client.submit(_request("finish"))
        assert [output.token_ids async for output in later] == [[1]]
        assert not good.ended
        good.cancel()
        await asyncio.sleep(0.05)
    assert set(servicer.aborts) == {(gap.request_id, 0), (good.request_id, 0)}


async def test_a_higher_attempt_takes_over_and_outlives_the_lower_ones_cancel(
    scripted: tuple[_Scripted, str],
) -> None:
    _, address = scripted
    async with ShardClient(address) as client:
        first = client.submit(_request("silent"), request_id="x")
        with pytest.raises(InvalidRequest, match="attempt 0"):
            client.submit(_request("silent"), request_id="x", attempt=0)
        second = client.submit(_request("finish"), request_id="x", attempt=1)
        with pytest.raises(ShardUnavailable, match="higher attempt"):
            await anext(first)
        first.cancel()
        assert [output.token_ids async for output in second] == [[1]]


def test_a_process_that_was_forked_mints_other_ids_than_its_parent() -> None:
    """Some servers load an application once and fork its workers."""
    program = """
import os
from penstock_client.rpc.shard_client import new_request_id
hears, tells = os.pipe()
if os.fork() == 0:
    os.write(tells, new_request_id().encode())
    os._exit(0)
os.wait()
print(new_request_id(), os.read(hears, 1000).decode())
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    mine, childs = run.stdout.split()
    assert mine != childs


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy"])
async def test_a_proxy_that_is_meant_for_the_internet_is_not_asked_for_a_shard(
    scripted: tuple[_Scripted, str], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard may need such a proxy to download a model."""
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    async with ShardClient(scripted[1]) as client:
        assert [o.token_ids async for o in client.submit(GenerationRequest([2]))] == [[1]]
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    async with ShardClient(scripted[1]) as client:
        with pytest.raises(ShardUnavailable, match="connection refused"):
            await anext(client.submit(GenerationRequest([2])))


async def test_use_after_close_is_an_error_of_ours(scripted: tuple[_Scripted, str]) -> None:
    _, address = scripted
    client = ShardClient(address)
    await client.close()
    with pytest.raises(ShardUnavailable, match="closed"):
        client.submit(_request("finish"))
    with pytest.raises(ShardUnavailable, match="closed"):
        await client.info()
    with pytest.raises(ShardUnavailable, match="closed"):
        await client.tokenizer_files()
    await client.abort(["x"])


async def test_waiting_for_a_fleet_ends_when_it_is_closed() -> None:
    fleet = Fleet(["127.0.0.1:1"])
    waiting = asyncio.create_task(fleet.wait_ready())
    await asyncio.sleep(0.01)
    await fleet.close()
    with pytest.raises(NoShardAvailable, match="closed"):
        await waiting


async def test_a_synchronous_call_that_ends_too_early_is_an_error(
    scripted: tuple[_Scripted, str],
) -> None:
    _, address = scripted

    def read() -> None:
        with SyncShardClient(address) as client:
            list(client.generate(_request("end the call")))

    with pytest.raises(ShardUnavailable, match="ended the call"):
        await asyncio.to_thread(read)


async def test_a_request_that_no_message_holds_is_refused_and_those_beside_it_go_on(
    scripted: tuple[_Scripted, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_client.rpc.shard_client.MAX_MESSAGE_BYTES", 1000)
    async with ShardClient(scripted[1]) as client:
        beside = client.submit(GenerationRequest([1], label="silent"))
        with pytest.raises(InvalidRequest, match="bytes on the wire; at most 1000"):
            client.submit(GenerationRequest([1] * 1000))
        assert [o.token_ids async for o in client.submit(GenerationRequest([2]))] == [[1]]
        assert not beside.ended
        # One that would be too large by the number that it is given.
        request = GenerationRequest([1] * 200)
        num_bytes = codec.generate_request(request, new_request_id()).ByteSize()
        monkeypatch.setattr("penstock_client.rpc.shard_client.MAX_MESSAGE_BYTES", num_bytes)
        with pytest.raises(InvalidRequest, match="bytes on the wire"):
            client.submit(request)


async def test_when_writing_to_a_call_fails_its_streams_end_and_the_next_call_works(
    scripted: tuple[_Scripted, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with ShardClient(scripted[1]) as client:
        waiting = client.submit(_request("silent"))
        assert client._call is not None

        async def write(message: object) -> None:
            raise ZeroDivisionError("nobody foresaw this")

        client._call._call.write = write
        with pytest.raises(ShardUnavailable, match="writing to shard"):
            async with asyncio.timeout(30):
                await anext(waiting)
        assert "nobody foresaw this" in caplog.text
        assert [output.token_ids async for output in client.generate(_request(""))] == [[1]]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("INTERNAL", ShardUnavailable),
        # Of a peer that calls itself flooded, a message that is too large, a proxy between.
        ("RESOURCE_EXHAUSTED", ShardUnavailable),
        ("INVALID_ARGUMENT", ShardUnavailable),
        ("DEADLINE_EXCEEDED", ShardUnavailable),
        # These hold for whatever is sent there.
        ("UNAUTHENTICATED", Unauthenticated),
        ("UNIMPLEMENTED", NotServed),
    ],
)
async def test_a_call_that_breaks_says_nothing_of_the_requests_on_it(
    scripted: tuple[_Scripted, str], status: str, error: type[PenstockError]
) -> None:
    async with ShardClient(scripted[1]) as client:
        beside = client.submit(GenerationRequest([1], label="silent"))
        broken = client.submit(GenerationRequest([1], label=f"break the call: {status}"))
        for stream in (beside, broken):
            with pytest.raises(error, match="what Core says"):
                await anext(stream)
