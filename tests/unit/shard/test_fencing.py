"""Requests that a shard takes: from whom, and for which engine and attempt."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import pytest
from support.engines import runner_info

from penstock_common.image_digest import image_digest
from penstock_proto import shard_pb2 as pb
from penstock_proto.codec import UnreadableMessage
from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Error, FinishReason, RequestOutput
from penstock_shard.config import ShardConfig
from penstock_shard.ipc import messages as link
from penstock_shard.server import servicer
from penstock_shard.server.early_aborts import EarlyAborts
from penstock_shard.server.images import EngineImages
from penstock_shard.server.servicer import ShardServicer

EVERY_ATTEMPT = 2**32


class Engine:
    """Stands for the supervisor of an engine: keeps what it is asked for."""

    def __init__(self) -> None:
        self.instance_id = "this one"
        self.ready: link.Ready | None = link.Ready(runner_info(), {}, "", "")
        self.images = EngineImages(2**20, lambda message: None)
        self.live: dict[str, int] = {}
        self.submitted: dict[tuple[str, int], dict[str, Any]] = {}
        self.deliver: dict[str, Callable[[RequestOutput], None]] = {}
        self.aborted: list[tuple[str, int]] = []
        self.refusals: list[Code] = []

    @property
    def metrics(self) -> Engine:
        return self

    def on_refusal(self, error: Error) -> None:
        self.refusals.append(error.code)

    def live_attempt(self, request_id: str) -> int | None:
        return self.live.get(request_id)

    def submit(
        self, submit: EngineRequest, deliver: Callable[[RequestOutput], None], **how: Any
    ) -> None:
        self.live[submit.request_id] = submit.attempt
        self.submitted[submit.request_id, submit.attempt] = how
        self.deliver[submit.request_id] = deliver

    def abort(self, request_id: str, attempt: int) -> None:
        self.aborted.append((request_id, attempt))


class Context:
    """A call: who makes it, and with what it was ended."""

    ended: tuple[grpc.StatusCode, str] | None = None

    def __init__(self, names: tuple[bytes, ...] = ()) -> None:
        self._names = list(names)

    async def abort(self, status: grpc.StatusCode, text: str) -> None:
        self.ended = status, text
        raise grpc.aio.AbortError

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": self._names} if self._names else {}


class Calls:
    """A servicer over an engine that does nothing by itself."""

    def __init__(self, follower: Any = None) -> None:
        self.engine = Engine()
        self.servicer = ShardServicer(cast("Any", self.engine), ShardConfig(), follower)

    def begin(
        self, *messages: pb.GenerateRequest, context: Context | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        async def sent() -> AsyncIterator[pb.GenerateRequest]:
            for message in messages:
                yield message

        return self.servicer.Generate(sent(), cast("Any", context or Context()))

    async def outputs(self, *messages: pb.GenerateRequest) -> list[pb.Output]:
        """Return all outputs of a call that ends by itself."""
        return [output for each in await rest(self.begin(*messages)) for output in each.outputs]


async def rest(call: AsyncIterator[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    """Return the remaining responses of a call, which may end with an error."""
    responses: list[pb.GenerateResponse] = []
    with contextlib.suppress(grpc.aio.AbortError):
        async for response in call:
            responses.append(response)  # noqa: PERF401
    return responses


def _message(request_id: str = "a", attempt: int = 0, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id, attempt=attempt, prompt_token_ids=[7], **fields
    )


def _tokens(request_id: str, attempt: int, position: int, *ids: int) -> RequestOutput:
    return RequestOutput(list(ids), position, request_id=request_id, attempt=attempt)


def _end(request_id: str, attempt: int = 0, error: Error | None = None) -> RequestOutput:
    finish = None if error else FinishReason.STOP
    return RequestOutput(
        [], 0, request_id=request_id, attempt=attempt, finish_reason=finish, error=error
    )


async def _give(
    calls: Calls, call: AsyncIterator[pb.GenerateResponse], *outputs: RequestOutput
) -> pb.GenerateResponse:
    """Have the engine give outputs once it has their requests. Returns the next response."""
    async with asyncio.timeout(30):
        reading = asyncio.ensure_future(anext(call))
        while any(output.request_id not in calls.engine.deliver for output in outputs):
            await asyncio.sleep(0)
        for output in outputs:
            calls.engine.deliver[output.request_id](output)
        return await reading


async def test_a_request_that_names_another_engine_is_refused() -> None:
    calls = Calls()
    [refused] = await calls.outputs(_message(attempt=3, instance_id="the one before"))
    assert (refused.request_id, refused.attempt, refused.first_position) == ("a", 3, 0)
    assert (refused.error.code, list(refused.token_ids)) == (Code.UNAVAILABLE, [])
    assert "is gone; this is another" in refused.error.message
    assert calls.engine.submitted == {}
    assert calls.engine.refusals == [Code.UNAVAILABLE]


@pytest.mark.parametrize("meant", ["", "this one"])
async def test_a_request_that_names_this_engine_or_none_is_taken(meant: str) -> None:
    calls = Calls()
    call = calls.begin(_message(instance_id=meant))
    await _give(calls, call, _end("a"))
    assert list(calls.engine.submitted) == [("a", 0)]


async def test_without_an_engine_every_request_is_refused() -> None:
    calls = Calls()
    calls.engine.ready = None
    [refused] = await calls.outputs(_message())
    assert refused.error.code == Code.UNAVAILABLE
    assert "not ready" in refused.error.message


@pytest.mark.parametrize(("live", "attempt"), [(2, 2), (2, 1)])
async def test_an_attempt_that_is_not_above_the_live_one_is_refused(
    live: int, attempt: int
) -> None:
    calls = Calls()
    calls.engine.live["a"] = live
    [refused] = await calls.outputs(_message(attempt=attempt))
    assert refused.error.code == Code.ALREADY_EXISTS
    assert refused.error.message == f"attempt {live} of request a is running"
    assert (refused.error.field, refused.error.value) == ("attempt", str(attempt))


async def test_a_higher_attempt_is_taken() -> None:
    calls = Calls()
    calls.engine.live["a"] = 2
    await _give(calls, calls.begin(_message(attempt=3)), _end("a", 3))
    assert list(calls.engine.submitted) == [("a", 3)]


async def test_an_attempt_that_comes_twice_on_a_call_is_taken_once() -> None:
    calls = Calls()
    call = calls.begin(_message(), _message(), _message("b"))
    for name in "ba":
        response = await _give(calls, call, _end(name))
        [output] = response.outputs
        assert (output.request_id, output.HasField("finish")) == (name, True)


async def test_the_deadline_the_caller_and_the_suspicion_are_passed_on() -> None:
    calls = Calls()
    message = _message(suspect=True, caller="x" * 1000)
    message.objective.deadline_ms = 1500
    other = _message("b")
    await _give(calls, calls.begin(message, other), _end("a"), _end("b"))
    told, told_other = calls.engine.submitted.values()
    assert (told["deadline_s"], told["suspect"]) == (1.5, True)
    assert (told_other["deadline_s"], told_other["suspect"]) == (None, False)
    # A caller's name counts within its call, and is no longer than an id.
    assert told["caller"][0] is told_other["caller"][0]
    assert (told["caller"][1], told_other["caller"][1]) == ("x" * 256, "")


async def test_single_tokens_go_into_columns_under_the_number_of_their_attempt() -> None:
    calls = Calls()
    call = calls.begin(_message(number=5), _message("b"))
    response = await _give(calls, call, _tokens("b", 0, 0, 8), _tokens("a", 0, 0, 9))
    assert (list(response.tokens.numbers), list(response.tokens.token_ids)) == ([5], [9])
    assert [output.request_id for output in response.outputs] == ["b"]


async def test_what_comes_while_the_caller_reads_nothing_is_merged() -> None:
    calls = Calls()
    call = calls.begin(_message(), _message("b"))
    died = Error(Code.UNAVAILABLE, "it died", engine_died=True)
    given = [_tokens("a", 0, 0, 1), _tokens("a", 0, 1, 2, 3), _end("a")]
    response = await _give(calls, call, *given, _tokens("b", 0, 0, 4), _end("b", error=died))
    ended, last, failed = response.outputs
    assert (list(ended.token_ids), ended.HasField("finish")) == ([1, 2, 3], True)
    # Clients look at nothing but the error of an output that has one.
    assert (last.request_id, list(last.token_ids), last.HasField("error")) == ("b", [4], False)
    assert (failed.request_id, list(failed.token_ids)) == ("b", [])
    assert (failed.error.message, failed.error.engine_died) == ("it died", True)


@pytest.mark.parametrize("num_requests", [1, 2, 3])
async def test_the_error_of_a_call_s_only_request_is_the_call_s(num_requests: int) -> None:
    calls, context = Calls(), Context()
    names = ["a", "b", "c"][:num_requests]
    call = calls.begin(*(_message(name) for name in names), context=context)
    error = Error(Code.UNAVAILABLE, "it died")
    await _give(calls, call, *(_end(name, error=error) for name in names))
    assert await rest(call) == []
    only = (grpc.StatusCode.UNAVAILABLE, "it died")
    assert context.ended == (only if num_requests == 1 else None)


async def test_a_call_without_an_error_ends_well() -> None:
    calls, context = Calls(), Context()
    call = calls.begin(_message(), context=context)
    await _give(calls, call, _end("a"))
    assert await rest(call) == []
    assert context.ended is None


async def test_a_message_that_cannot_be_read_ends_its_call() -> None:
    calls, context = Calls(), Context()

    async def sent() -> AsyncIterator[pb.GenerateRequest]:
        yield _message()
        raise UnreadableMessage("truncated")

    call = calls.servicer.Generate(sent(), cast("Any", context))
    assert await rest(call) == []
    assert context.ended is not None
    code, text = context.ended
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text.startswith("/penstock.v1.Shard/Generate: a message cannot be read; ")
    assert calls.engine.aborted == [("a", 0)]


async def test_what_is_unfinished_when_a_call_ends_is_aborted_in_its_caller_s_name() -> None:
    calls = Calls()
    call = calls.begin(_message(attempt=4), _message("b"), context=Context((b"router",)))
    reading = asyncio.ensure_future(anext(call))
    async with asyncio.timeout(30):
        while len(calls.engine.submitted) < 2:
            await asyncio.sleep(0)
    (unfinished, _), (finished, _) = calls.engine.submitted
    assert unfinished.endswith("/a")
    calls.engine.deliver[finished](_end(finished))
    assert [output.request_id for output in (await reading).outputs] == ["b"]
    assert calls.servicer.num_unread == 1
    await cast("Any", call).aclose()
    assert calls.servicer.num_unread == 0
    assert calls.engine.aborted == [(unfinished, 4)]


async def test_a_call_that_ends_while_its_requests_are_read_leaves_no_error_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls, ended = Calls(), asyncio.Event()

    async def sent() -> AsyncIterator[pb.GenerateRequest]:
        yield _message()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = calls.servicer.Generate(sent(), cast("Any", Context()))
    await _give(calls, call, _tokens("a", 0, 0, 1))
    await cast("Any", call).aclose()
    async with asyncio.timeout(30):
        await ended.wait()
    await asyncio.sleep(0.01)
    # A reader that was ended has no error to tell.
    assert caplog.records == []


async def test_followers_are_told_of_each_request_and_see_its_outputs() -> None:
    told: list[Any] = []

    class Follower:
        def outlet(self, submission: Any, instance_id: str, deliver: Any) -> Any:
            told.append((submission.request_id, instance_id))

            def outlet(output: RequestOutput) -> None:
                told.append(output.is_last)
                deliver(output)

            return outlet

    calls = Calls(Follower())
    await _give(calls, calls.begin(_message()), _end("a"))
    [refused] = await calls.outputs(_message("b", instance_id="another"))
    assert refused.request_id == "b"
    assert told == [("a", "this one"), True, ("b", "this one"), True]


@pytest.mark.parametrize(
    ("names", "same"),
    [
        ((b"b", b"a"), True),
        ((b"ab",), False),
        ((b"a", b"b", b"c"), False),
    ],
)
async def test_a_caller_is_known_by_its_names_in_any_order(
    names: tuple[bytes, ...], same: bool
) -> None:
    calls = Calls()
    for each in ((b"a", b"b"), names):
        request = pb.AbortRequest(request_ids=["x"])
        await calls.servicer.Abort(request, cast("Any", Context(each)))
    (first, _), (second, _) = calls.engine.aborted
    assert (first == second) == same
    # Sixteen hexadecimal digits, a bar and the id itself.
    assert len(first) == len("0123456789abcdef/x")


async def test_an_abort_names_the_highest_attempt_it_is_for_or_all_of_them() -> None:
    calls, context = Calls(), cast("Any", Context())
    await calls.servicer.Abort(pb.AbortRequest(request_ids=["a"], attempts=[3]), context)
    await calls.servicer.Abort(pb.AbortRequest(request_ids=["b"]), context)
    assert calls.engine.aborted == [("a", 3), ("b", EVERY_ATTEMPT)]


@pytest.mark.parametrize("count", [65_536, 65_537])
async def test_aborts_in_one_call_are_bounded(count: int) -> None:
    calls, context = Calls(), Context()
    with contextlib.suppress(grpc.aio.AbortError):
        request = pb.AbortRequest(request_ids=["a"] * count)
        await calls.servicer.Abort(request, cast("Any", context))
    if count == 65_536:
        assert context.ended is None
        assert len(calls.engine.aborted) == count
    else:
        text = "request_ids: 65537 ids in one call; at most 65536"
        assert context.ended == (grpc.StatusCode.INVALID_ARGUMENT, text)
        assert calls.engine.aborted == []


# ---- aborts that come before their request ----


def test_an_early_abort_counts_until_half_a_minute_is_over_for_its_attempt_and_lower() -> None:
    now_s = 0.0
    aborts = EarlyAborts(lambda: now_s)
    aborts.remember("a", 1)
    assert [aborts.include("a", attempt) for attempt in (0, 1, 2)] == [True, True, False]
    assert not aborts.include("b", 0)
    now_s = 30.0
    assert not aborts.include("a", 0)


def test_an_early_abort_of_attempt_0_is_one() -> None:
    aborts = EarlyAborts(lambda: 0.5)
    aborts.remember("a", 0)
    assert aborts.include("a", 0)
    assert not aborts.include("a", 1)


def test_the_oldest_early_aborts_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_shard.server.early_aborts._MEMORY_IDS", 2)
    aborts = EarlyAborts(lambda: 0.0)
    for name in ("a", "b", "a", "c"):
        aborts.remember(name, 0)
    assert [aborts.include(name, 0) for name in "abc"] == [True, False, True]


def test_what_is_over_is_forgotten_before_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("penstock_shard.server.early_aborts._MEMORY_IDS", 2)
    aborts = EarlyAborts(lambda: now_s)
    aborts.remember("a", 0)
    now_s = 20.0
    aborts.remember("b", 0)
    now_s = 30.0
    aborts.remember("c", 0)
    assert [aborts.include(name, 0) for name in "bc"] == [True, True]


# ---- Images -------------------------------------------------------------------------------------

_SIZE = (30, 20)
_PIXELS = bytes(range(200)) * 9
_DIGEST = image_digest(*_SIZE, _PIXELS)


async def _put(calls: Calls, *pixels: bytes, stalls: bool = False) -> Any:
    """Send an image in chunks. Returns the shard's answer; status and text if it refuses."""
    ready = calls.engine.ready
    assert ready is not None
    info = dataclasses.replace(ready.info, capabilities=ready.info.capabilities | {"images"})
    calls.engine.ready = link.Ready(info, {}, "", "")

    async def chunks() -> AsyncIterator[pb.ImageChunk]:
        yield pb.ImageChunk(digest=_DIGEST, width=_SIZE[0], height=_SIZE[1])
        for each in pixels:
            yield pb.ImageChunk(pixels=each)
        if stalls:
            await asyncio.Event().wait()

    context = Context()
    try:
        return await calls.servicer.PutImage(chunks(), cast("Any", context))
    except grpc.aio.AbortError:
        assert context.ended is not None
        return context.ended


async def test_an_image_that_comes_in_pieces_is_kept_and_not_asked_for_twice() -> None:
    calls = Calls()
    assert not (await _put(calls, _PIXELS[:700], _PIXELS[700:])).was_there
    assert _DIGEST in calls.engine.images
    assert (await _put(calls)).was_there


async def test_a_chunk_has_a_bounded_size() -> None:
    calls = Calls()
    status, text = await _put(calls, bytes(2**20 + 1))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert text.startswith("pixels: a chunk of 1048577 bytes is out of bounds; allowed: 1048576")


async def test_an_image_that_does_not_come_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "_IMAGE_TIMEOUT_S", 0.05)
    calls = Calls()
    status, text = await _put(calls, _PIXELS[:700], stalls=True)
    assert (status, text) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "the image did not come within 0.05 s",
    )
    assert (_DIGEST in calls.engine.images, calls.engine.images.num_bytes) == (False, 0)
