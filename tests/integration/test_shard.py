"""A real shard (fake runner) over gRPC, through the client library and by hand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.budget import in_soak
from support.processes import Shard, is_alive, running, wait_until

from penstock_cli.health import main as health
from penstock_client import (
    DeadlineExceeded,
    FinishReason,
    GenerationRequest,
    InvalidRequest,
    NotServed,
    Objective,
    Overloaded,
    SamplingParams,
    ShardClient,
    ShardUnavailable,
    SyncShardClient,
    Unauthenticated,
)
from penstock_proto import shard_pb2 as pb
from penstock_proto.shard_pb2_grpc import ShardStub

BUILTIN = Path(__file__).parents[2] / "shard" / "penstock_shard" / "builtin_model"


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    log_file = tmp_path_factory.mktemp("shard") / "log"
    flags = ("--step-ms", "5", "--max-num-seqs", "64", "--max-num-batched-tokens", "256")
    # Between tests the engine counts again who has which block, and ends where that differs.
    service = Shard(log_file, *flags, "--check-integrity")
    with running(service):
        yield service
        assert "AssertionError" not in service.log


@pytest.fixture
async def client(shard: Shard) -> AsyncIterator[ShardClient]:
    async with ShardClient(shard.address) as client:
        yield client


async def _tokens(
    client: ShardClient, request: GenerationRequest, begun: asyncio.Event | None = None
) -> list[int]:
    """Return all tokens of a request; `begun` is set when the first has come."""
    token_ids: list[int] = []
    async for output in client.generate(request):
        token_ids += output.token_ids
        if begun is not None:
            begun.set()
    return token_ids


async def _load(client: ShardClient):
    reports = client.watch_load()
    try:
        return await anext(reports)
    finally:
        await reports.aclose()


async def _wait_idle(client: ShardClient) -> None:
    async with asyncio.timeout(5):
        while (load := await _load(client)).referenced_blocks or load.running or load.waiting:
            await asyncio.sleep(0.02)


async def test_a_generation_ends_with_one_finish_and_all_its_tokens(client: ShardClient) -> None:
    request = GenerationRequest([5, 6, 7], SamplingParams(seed=3), max_tokens=20, logprobs=2)
    outputs = [output async for output in client.generate(request)]
    assert sum(len(output.token_ids) for output in outputs) == 20
    assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
    assert outputs[0].cached_tokens == 0
    assert outputs[0].queue_s is not None
    assert 0 <= outputs[0].queue_s < 1
    assert all(output.queue_s is None for output in outputs[1:])
    assert all(output.logprobs and output.logprobs.top_n == 2 for output in outputs)


async def test_the_synchronous_client_gives_the_same_tokens(
    shard: Shard, client: ShardClient
) -> None:
    request = GenerationRequest([5, 6, 7], SamplingParams(seed=4), max_tokens=10)
    expected = await _tokens(client, request)

    def blocking() -> list[int]:
        with SyncShardClient(shard.address) as sync_client:
            assert sync_client.info().model == "penstock-toy"
            assert "tokenizer.json" in sync_client.tokenizer_files()
            return [i for output in sync_client.generate(request) for i in output.token_ids]

    assert await asyncio.to_thread(blocking) == expected


async def test_many_streams_share_one_call_and_each_gets_its_own_tokens(
    client: ShardClient,
) -> None:
    requests = [
        GenerationRequest([1, 2, i], SamplingParams(seed=i), max_tokens=30) for i in range(100)
    ]
    together = await asyncio.gather(*(_tokens(client, request) for request in requests))
    assert [await _tokens(client, request) for request in requests[:3]] == together[:3]
    assert all(len(tokens) == 30 for tokens in together)


async def test_a_request_goes_on_after_the_output_it_brings(client: ShardClient) -> None:
    request = GenerationRequest([9, 8], SamplingParams(seed=1), max_tokens=12)
    whole = await _tokens(client, request)
    rest = GenerationRequest(
        [9, 8], SamplingParams(seed=1), max_tokens=12, output_token_ids=whole[:7]
    )
    assert await _tokens(client, rest) == whole[7:]


async def test_cancelling_frees_every_block(client: ShardClient) -> None:
    async with client.submit(GenerationRequest(list(range(100)), max_tokens=1900)) as stream:
        await anext(stream)
        assert (await _load(client)).referenced_blocks > 0
    await _wait_idle(client)


async def test_leaving_a_cancelled_task_aborts_its_request(client: ShardClient) -> None:
    task = asyncio.create_task(_tokens(client, GenerationRequest([1], max_tokens=1500)))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await _wait_idle(client)


async def test_a_thousand_aborts_in_the_same_moment_as_their_submits_leave_nothing(
    client: ShardClient,
) -> None:
    streams = [client.submit(GenerationRequest([1, 2, 3], max_tokens=1500)) for _ in range(1000)]
    for stream in streams:
        stream.cancel()
    await asyncio.sleep(0.1)
    await _wait_idle(client)
    assert len(await _tokens(client, GenerationRequest([1], max_tokens=3))) == 3


async def test_cancelling_a_hundred_handlers_in_mid_submit_disturbs_no_other_stream(
    client: ShardClient,
) -> None:
    request = GenerationRequest([4, 4], SamplingParams(seed=5), max_tokens=60)
    alone = await _tokens(client, request)
    bystanders = [asyncio.create_task(_tokens(client, request)) for _ in range(20)]
    await asyncio.sleep(0.02)
    handlers = [
        asyncio.create_task(_tokens(client, GenerationRequest([1, i], max_tokens=500)))
        for i in range(100)
    ]
    for delay in range(100):
        if delay % 10 == 0:
            await asyncio.sleep(0)
        handlers[delay].cancel()
    await asyncio.gather(*handlers, return_exceptions=True)
    assert await asyncio.gather(*bystanders) == [alone] * 20
    await _wait_idle(client)


async def test_an_abort_that_comes_before_its_submit_is_remembered(shard: Shard) -> None:
    async with grpc.aio.insecure_channel(shard.address) as channel:
        stub = ShardStub(channel)
        await stub.Abort(pb.AbortRequest(request_ids=["early"]))
        outputs = await _raw_generate(stub, "early")
    assert [output.finish.reason for output in outputs] == [pb.Finish.REASON_ABORTED]


async def test_ending_the_call_aborts_what_is_unfinished_on_it(
    shard: Shard, client: ShardClient
) -> None:
    async with grpc.aio.insecure_channel(shard.address) as channel:
        call = ShardStub(channel).Generate()
        await call.write(_raw_request("left-behind", max_tokens=1500))
        await call.read()
        call.cancel()
    await _wait_idle(client)


async def test_a_higher_attempt_ends_the_lower_one(shard: Shard) -> None:
    async with grpc.aio.insecure_channel(shard.address) as channel:
        call = ShardStub(channel).Generate()
        await call.write(_raw_request("twice", max_tokens=1500))
        await call.read()
        await call.write(_raw_request("twice", attempt=1, max_tokens=3))
        await call.done_writing()
        endings = {}
        while (response := await call.read()) is not grpc.aio.EOF:
            for output in response.outputs:
                if output.HasField("finish"):
                    endings[output.attempt] = output.finish.reason
    assert endings == {0: pb.Finish.REASON_ABORTED, 1: pb.Finish.REASON_LENGTH}


async def test_an_attempt_that_is_running_already_is_refused(shard: Shard) -> None:
    async with grpc.aio.insecure_channel(shard.address) as channel:
        call = ShardStub(channel).Generate()
        await call.write(_raw_request("same", max_tokens=1500))
        await call.read()
        second = ShardStub(channel).Generate()
        await second.write(_raw_request("same", max_tokens=3))
        await second.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in second:
                pass
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        call.cancel()


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (GenerationRequest([]), InvalidRequest, ["prompt_token_ids", "1..2047"]),
        (GenerationRequest([1] * 2048), InvalidRequest, ["prompt_token_ids", "2048"]),
        (GenerationRequest([10**9]), InvalidRequest, ["prompt_token_ids", "vocabulary"]),
        (GenerationRequest([-1]), InvalidRequest, ["prompt_token_ids"]),
        (GenerationRequest([1], max_tokens=0), InvalidRequest, ["max_tokens", "1..2047"]),
        (GenerationRequest([1], max_tokens=2048), InvalidRequest, ["max_tokens", "2048"]),
        (GenerationRequest([1], logprobs=21), InvalidRequest, ["logprobs", "20"]),
        (GenerationRequest([1], stop_token_ids=[10**9]), InvalidRequest, ["stop_token_ids"]),
        (
            GenerationRequest([1], SamplingParams(temperature=-1.0)),
            InvalidRequest,
            ["temperature", "-1", "0..100"],
        ),
        (
            GenerationRequest([1], SamplingParams(temperature=float("nan"))),
            InvalidRequest,
            ["temperature", "nan"],
        ),
        (GenerationRequest([1], SamplingParams(top_p=0.0)), InvalidRequest, ["top_p"]),
        (GenerationRequest([1], SamplingParams(min_p=1.5)), InvalidRequest, ["min_p", "0..1"]),
        (GenerationRequest([1], SamplingParams(top_k=-2)), InvalidRequest, ["top_k", "-1"]),
        (GenerationRequest([1], model="other"), InvalidRequest, ["other", "penstock-toy"]),
        (
            GenerationRequest([1], max_tokens=4, min_tokens=5),
            InvalidRequest,
            ["min_tokens", "5", "4"],
        ),
        (
            GenerationRequest([1], SamplingParams(repetition_penalty=-1.0)),
            InvalidRequest,
            ["repetition_penalty", "-1", "above 0"],
        ),
        (
            GenerationRequest([1], objective=Objective(priority=5000)),
            InvalidRequest,
            ["priority", "5000", "1000"],
        ),
        (GenerationRequest([1], adapter="lora"), NotServed, ["adapter"]),
    ],
)  # fmt: skip
async def test_a_bad_request_ends_alone_and_says_why(
    client: ShardClient, request_: GenerationRequest, error: type[Exception], words: list[str]
) -> None:
    beside = asyncio.create_task(_tokens(client, GenerationRequest([1], max_tokens=10)))
    with pytest.raises(error) as caught:
        await _tokens(client, request_)
    assert all(word in str(caught.value) for word in words)
    assert len(await beside) == 10


async def test_neutral_values_are_no_error(client: ShardClient) -> None:
    sampling = SamplingParams(
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, typical_p=1.0
    )
    request = GenerationRequest([1], sampling, max_tokens=2, min_tokens=0)
    assert len(await _tokens(client, request)) == 2


def test_a_direct_call_with_one_bad_request_ends_with_its_status(shard: Shard) -> None:
    with grpc.insecure_channel(shard.address) as channel:
        call = ShardStub(channel).Generate(iter([_raw_request("bad", max_tokens=0)]))
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens" in str(caught.value.details())


async def test_a_deadline_ends_the_request_in_the_shard(client: ShardClient) -> None:
    request = GenerationRequest([1], max_tokens=1500, objective=Objective(deadline_s=0.1))
    with pytest.raises(DeadlineExceeded, match="deadline passed"):
        await _tokens(client, request)
    await _wait_idle(client)


def test_the_deadline_of_a_synchronous_call_ends_it(shard: Shard) -> None:
    with SyncShardClient(shard.address) as client, pytest.raises(DeadlineExceeded):
        list(client.generate(GenerationRequest([1], max_tokens=1500), timeout_s=0.2))


async def test_a_slow_reader_gets_everything_in_fewer_pieces(client: ShardClient) -> None:
    request = GenerationRequest([1, 2], SamplingParams(seed=8), max_tokens=50)
    quick = await _tokens(client, request)
    async with client.submit(request) as stream:
        await asyncio.sleep(0.5)
        outputs = [output async for output in stream]
    assert [i for output in outputs for i in output.token_ids] == quick
    # One, unless the machine is so busy that some came later.
    assert len(outputs) < len(quick) / 2


def test_the_tokenizer_arrives_whole(shard: Shard) -> None:
    with SyncShardClient(shard.address) as client:
        files = client.tokenizer_files()
    assert files["tokenizer.json"] == (BUILTIN / "tokenizer.json").read_bytes()


def test_health_and_reflection_are_served(shard: Shard) -> None:
    assert health([shard.address]) == 0
    with grpc.insecure_channel(shard.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"penstock.v1.Shard", "grpc.health.v1.Health"} <= names


def test_a_shard_without_adapters_says_how_to_have_some(shard: Shard) -> None:
    with grpc.insecure_channel(shard.address) as channel:
        for call, request in (
            (ShardStub(channel).LoadAdapter, pb.LoadAdapterRequest()),
            (ShardStub(channel).UnloadAdapter, pb.UnloadAdapterRequest()),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "--enable-lora" in str(caught.value.details())


_KEY = "s3cret"
_MB = 1_000_000


class _Peak:
    """The largest growth of a process's memory within this scope, in MB."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.grown_mb = 0.0

    async def __aenter__(self) -> _Peak:
        self._before = self._process.memory_info().rss
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            grown = (self._process.memory_info().rss - self._before) / _MB
            self.grown_mb = max(self.grown_mb, grown)
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    """A shard with a key, which runs one request at a time."""
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "2", "--step-ms", "10")
    service = Shard(tmp_path_factory.mktemp("locked") / "log", "--api-key", _KEY, *flags)
    with running(service):
        yield service


async def test_a_shard_with_a_key_refuses_calls_without_it(locked: Shard) -> None:
    for key in (None, "wrong"):
        async with ShardClient(locked.address, api_key=key) as client:
            with pytest.raises(Unauthenticated):
                await client.info()
            with pytest.raises(Unauthenticated):
                await _tokens(client, GenerationRequest([1], max_tokens=1))
    async with ShardClient(locked.address, api_key=_KEY) as client:
        assert len(await _tokens(client, GenerationRequest([1], max_tokens=1))) == 1
    assert _KEY not in locked.log
    assert _KEY not in " ".join(locked.engine.cmdline())


_CHECK = "/grpc.health.v1.Health/Check"
_UNREADABLE = "a message cannot be read; send the one that the service's proto names"


async def _end_of(call: Any) -> tuple[str, str]:
    """The status of a call that sends one message to a shard."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


async def _send_all(shard: Shard, path: str, size: int, **options: Any) -> set[tuple[str, str]]:
    """Eight messages of a stranger, each on a connection of its own."""
    sent: list[tuple[str, str]] = []

    async def send() -> None:
        unbounded = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(shard.address, options=unbounded) as channel:
            # What is sent is bytes, and no message.
            call_of: Any = channel.unary_stream(path)
            sent.append(await _end_of(call_of(b"\x0a" + bytes(size), timeout=30, **options)))

    await asyncio.gather(*(send() for _ in range(8)))
    return set(sent)


@pytest.mark.parametrize(
    "path",
    [
        "/penstock.v1.Shard/Abort",
        "/penstock.v1.Shard/Generate",
        "/penstock.v1.Shard/NoSuchMethod",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/no.such.Service/Method",
    ],
)
async def test_of_a_caller_without_the_key_no_message_is_received(locked: Shard, path: str) -> None:
    async with _Peak(locked.process.pid) as peak:
        ends = await _send_all(locked, path, 10 * _MB)
    assert ends == {("UNAUTHENTICATED", "missing or wrong API key")}
    assert peak.grown_mb < 16


async def test_a_health_check_needs_no_key_and_brings_no_large_message(locked: Shard) -> None:
    async with _Peak(locked.process.pid) as peak:
        ends = {code for code, _ in await _send_all(locked, _CHECK, 20 * _MB)}
    assert ends <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    # They are received as far as a tenth of a second goes, and four at once; never parsed, which
    # would take as much again.
    assert peak.grown_mb < 220
    assert health([locked.address]) == 0
    assert health([locked.address, "--live"]) == 0


async def test_a_health_check_that_cannot_be_read_is_refused_in_one_line(locked: Shard) -> None:
    # A name of no length, and then a field with the number 0, which none may have.
    ends = await _send_all(locked, _CHECK, 2)
    assert ("INVALID_ARGUMENT", f"{_CHECK}: {_UNREADABLE}") in ends
    assert {code for code, _ in ends} <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}


@pytest.mark.parametrize("path", [_CHECK, "/penstock.v1.Shard/Abort"])
async def test_a_compressed_message_is_refused_before_it_is_inflated(
    locked: Shard, path: str
) -> None:
    async with _Peak(locked.process.pid) as peak:
        ends = await _send_all(locked, path, 10 * _MB, compression=grpc.Compression.Gzip)
    assert {code for code, _ in ends} == {"UNIMPLEMENTED"}
    assert peak.grown_mb < 16


async def test_a_full_queue_refuses_at_once(locked: Shard) -> None:
    async with ShardClient(locked.address, api_key=_KEY) as client:
        streams = [client.submit(GenerationRequest([1], max_tokens=500)) for _ in range(6)]
        results = await asyncio.gather(*(anext(s) for s in streams[3:]), return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in results) >= 2
        for stream in streams:
            stream.cancel()
        await _wait_idle(client)


# The last one of that shard.
async def test_draining_finishes_what_runs_and_takes_nothing_new(locked: Shard) -> None:
    async with ShardClient(locked.address, api_key=_KEY) as client:
        begun = asyncio.Event()
        running_tokens = asyncio.create_task(
            _tokens(client, GenerationRequest([1], max_tokens=100), begun)
        )
        await begun.wait()
        left = [progress.running async for progress in client.drain()]
        assert left[0] == 1
        assert left[-1] == 0
        assert len(await running_tokens) == 100
        with pytest.raises(ShardUnavailable, match="draining"):
            await _tokens(client, GenerationRequest([1], max_tokens=1))
    wait_until(lambda: not locked.healthy(), timeout_s=30, what="not healthy after a drain")


@pytest.mark.parametrize(
    "flags", [("--runner", "fake"), in_soak(("--model", str(BUILTIN), "--device", "cpu"))]
)
async def test_a_spare_engine_takes_over_and_is_replaced(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    shard = Shard(tmp_path / "log", "--standby", *flags)
    with running(shard):
        wait_until(lambda: len(shard.engines) == 2, timeout_s=30, what="a spare engine")
        first, spare = sorted(shard.engines, key=lambda engine: engine.create_time())
        first.kill()
        line = "the spare engine process takes over"
        wait_until(lambda: line in shard.log, timeout_s=30, what="the log says so")
        wait_until(lambda: len(shard.engines) == 2, timeout_s=30, what="another spare engine")
        assert spare in shard.engines
        shard.wait_healthy()
        async with ShardClient(shard.address) as client:
            assert len(await _tokens(client, GenerationRequest([1, 2, 3], max_tokens=4))) == 4
        engines = shard.engines
        shard.process.terminate()
        shard.process.wait(30)
        wait_until(lambda: not any(map(is_alive, engines)), timeout_s=30, what="both have ended")


def test_a_port_in_use_is_one_clear_line(shard: Shard) -> None:
    port = shard.address.rpartition(":")[2]
    run = subprocess.run(
        [sys.executable, "-m", "penstock_shard", "--runner", "fake", "--port", port],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use" in run.stderr
    if sys.platform == "linux":
        assert f"(process {shard.process.pid})" in run.stderr
    assert "Traceback" not in run.stderr


async def _raw_generate(stub, request_id: str) -> list[pb.Output]:
    call = stub.Generate()
    await call.write(_raw_request(request_id, max_tokens=5))
    await call.done_writing()
    return [output async for response in call for output in response.outputs]


def _raw_request(request_id: str, *, attempt: int = 0, max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        attempt=attempt,
        prompt_token_ids=[1, 2, 3],
        stop=pb.StopConditions(max_tokens=max_tokens),
    )


async def test_a_request_sent_twice_on_one_call_runs_once_to_its_end(shard: Shard) -> None:
    async with grpc.aio.insecure_channel(shard.address) as channel:
        call = ShardStub(channel).Generate()
        await call.write(_raw_request("doubled", max_tokens=20))
        await call.write(_raw_request("doubled", max_tokens=20))
        await call.done_writing()
        outputs = []
        while (response := await call.read()) is not grpc.aio.EOF:
            outputs += response.outputs
    assert sum(len(output.token_ids) for output in outputs) == 20
    assert [o.finish.reason for o in outputs if o.HasField("finish")] == [pb.Finish.REASON_LENGTH]


async def test_a_message_that_cannot_be_read_ends_its_call_with_a_status(
    shard: Shard, client: ShardClient
) -> None:
    async with grpc.aio.insecure_channel(shard.address) as channel:
        generate = channel.stream_stream(
            "/penstock.v1.Shard/Generate", request_serializer=bytes, response_deserializer=bytes
        )
        call = generate()
        answers = aiter(call)
        await call.write(_raw_request("beside", max_tokens=1500).SerializeToString())
        await anext(answers)
        # Field 1, a string of two bytes that are no UTF-8.
        await call.write(b"\x0a\x02\xff\xfe")
        # All that was sent before is read first: the end comes after it.
        end = await _end_of(answers)
    assert end == ("INVALID_ARGUMENT", f"/penstock.v1.Shard/Generate: {_UNREADABLE}")
    await _wait_idle(client)


_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize(
    "path",
    [
        *(
            f"/penstock.v1.Shard/{each.name}"
            for each in pb.DESCRIPTOR.services_by_name["Shard"].methods
        ),
        *(_CHECK, "/grpc.health.v1.Health/Watch", _REFLECTION),
    ],
)
@pytest.mark.parametrize("message", [b"\x0a\x02\xff", b"\x00", b"\xff"])
async def test_what_is_no_message_is_refused_in_one_line_of_ours_by_every_method(
    shard: Shard, path: str, message: bytes
) -> None:
    async with grpc.aio.insecure_channel(shard.address) as channel:
        call: Any = channel.stream_stream(path)()
        await call.write(message)
        await call.done_writing()
        end = await _end_of(aiter(call))
    assert end == ("INVALID_ARGUMENT", f"{path}: {_UNREADABLE}")


async def test_too_many_aborts_in_one_call_are_refused(shard: Shard) -> None:
    async with grpc.aio.insecure_channel(shard.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ShardStub(channel).Abort(pb.AbortRequest(request_ids=["x"] * 70_000))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "65536" in str(caught.value.details())


async def test_a_caller_that_stops_reading_and_leaves_costs_no_traceback(
    shard: Shard, client: ShardClient
) -> None:
    async with grpc.aio.insecure_channel(shard.address) as channel:
        call = ShardStub(channel).Generate()
        for number in range(32):
            request = _raw_request(f"unread {number}", max_tokens=1500)
            request.output.logprobs = 20
            await call.write(request)
        await asyncio.sleep(1)
        call.cancel()
    await _wait_idle(client)
    assert "Traceback" not in shard.log


# The last one of its shard.
async def test_sigterm_lets_running_requests_finish_and_exits_with_0(
    shard: Shard, client: ShardClient
) -> None:
    begun = asyncio.Event()
    tokens = asyncio.create_task(_tokens(client, GenerationRequest([1], max_tokens=200), begun))
    await begun.wait()
    shard.process.terminate()
    assert len(await tokens) == 200
    assert await asyncio.to_thread(shard.process.wait, 10) == 0
