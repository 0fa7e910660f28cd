"""The parts between the engine and a call: outbox, responses of bounded size, routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from support.engines import make_request, runner_info
from support.scores import logprobs_of

from penstock_client import Output as ClientOutput
from penstock_common.child_process.framing import encode_frame
from penstock_proto import codec
from penstock_proto import shard_pb2 as pb
from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Error, FinishReason, Logprobs, RequestOutput
from penstock_shard.config import ShardConfig
from penstock_shard.ipc import messages as link
from penstock_shard.server import servicer
from penstock_shard.server import supervisor as engine_supervisor
from penstock_shard.server.early_aborts import EarlyAborts
from penstock_shard.server.servicer import Outbox, ShardServicer
from penstock_shard.server.supervisor import EngineFailed, EngineSupervisor


def _output(request_id: str = "r", attempt: int = 0, **fields: object) -> RequestOutput:
    return RequestOutput([], 0, request_id=request_id, attempt=attempt, **fields)  # type: ignore[arg-type]


def _logprobs(count: int, top_n: int) -> Logprobs:
    best = [(token_id, -1.0) for token_id in range(count * top_n)]
    return logprobs_of([-float(i) for i in range(count)], [1] * count, top_n, best)


# ---- responses ----


def test_an_output_merged_for_long_is_cut_into_responses_of_bounded_size() -> None:
    count, top_n = 40_000, 20
    output = RequestOutput(
        list(range(count)),
        7,
        request_id="r",
        attempt=0,
        logprobs=_logprobs(count, top_n),
        cached_tokens=3,
        prompt_logprobs=_logprobs(20_000, top_n),
        finish_reason=FinishReason.LENGTH,
        queue_s=0.5,
    )
    responses = list(codec.responses([output]))
    assert max(response.ByteSize() for response in responses) < 600_000
    merged: ClientOutput | None = None
    for response in responses:
        for message in response.outputs:
            piece = codec.output(pb.Output.FromString(message.SerializeToString()))
            assert isinstance(piece, ClientOutput)
            if merged is None:
                merged = piece
            else:
                if piece.token_ids:
                    assert piece.first_position == 7 + len(merged.token_ids)
                merged.merge(piece)
    assert merged is not None
    assert merged.token_ids == list(range(count))
    assert merged.logprobs is not None
    assert merged.logprobs.top_token_ids == list(range(count * top_n))
    assert merged.prompt_logprobs is not None
    assert len(merged.prompt_logprobs.chosen) == 20_000
    assert merged.cached_tokens == 3
    assert merged.queue_s == 0.5
    assert responses[0].outputs[0].HasField("queue_s")


async def test_a_caller_that_reads_nothing_is_given_no_room_for_more() -> None:
    outbox = Outbox()
    for number in range(4096):
        outbox.put(_output(str(number), error=Error(Code.INVALID_ARGUMENT, "no")))
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert len(await outbox.take()) == 4096
    await waiting


async def test_a_request_ends_whose_scores_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MAX_UNREAD_SCORES_BYTES", 1000)
    ended: list[tuple[str, int]] = []
    outbox = Outbox("a/", lambda *which: ended.append(which))

    def scored(request_id: str, position: int) -> RequestOutput:
        return RequestOutput(
            [5], position, request_id=f"a/{request_id}", attempt=1, logprobs=_logprobs(1, 60)
        )

    for position in range(3):
        outbox.put(scored("behind", position))
        outbox.put(scored("read", position))
        if position == 1:
            # Read in between.
            del outbox._outputs["read", 1]
    assert ended == [("a/behind", 1)]
    outbox.put(
        RequestOutput([], 3, request_id="a/behind", attempt=1, finish_reason=FinishReason.ABORTED)
    )
    behind, read = await outbox.take()
    assert (behind.request_id, read.request_id, read.error) == ("behind", "read", None)
    assert behind.error is not None
    assert (behind.error.code, behind.error.field) == (Code.OUT_OF_RANGE, "logprobs")
    assert "1000 bytes" in behind.error.message


async def test_what_is_being_written_counts_as_unread() -> None:
    outbox = Outbox()
    outbox.put(_output())
    assert outbox.num_unread == 1
    await outbox.take()
    assert outbox.num_unread == 1
    outbox.close()
    assert await outbox.take() == []
    assert outbox.num_unread == 0


# ---- routes, without an engine process ----


class _Supervisor(EngineSupervisor):
    """Says that its engine is up, and keeps what would be sent to it."""

    def __init__(self, **settings: int) -> None:
        super().__init__(ShardConfig(**settings))  # type: ignore[arg-type]
        self.sent: list[link.Inbox] = []
        self._became_ready(link.Ready(runner_info(), {}, "", ""))

    def _flush(self) -> None:
        self._flush_scheduled = False
        self.sent.append(self._inbox)
        self._inbox = link.Inbox([], [])


def _submit(request_id: str, attempt: int = 0, num_tokens: int = 3) -> EngineRequest:
    return make_request(request_id, range(num_tokens), attempt=attempt)


async def test_more_requests_than_seats_and_queue_are_refused_while_the_engine_steps() -> None:
    supervisor = _Supervisor(max_num_seqs=2, max_queued_requests=3)
    delivered: list[RequestOutput] = []
    for number in range(10):
        supervisor.submit(_submit(str(number)), delivered.append)
    assert [output.request_id for output in delivered] == ["5", "6", "7", "8", "9"]
    assert delivered[0].error is not None
    assert delivered[0].error.code == 8
    assert "--max-queued-requests 3" in delivered[0].error.message


async def test_an_idle_shard_fills_its_seats_before_its_queue_counts() -> None:
    supervisor = _Supervisor(max_num_seqs=8, max_queued_requests=1)
    delivered: list[RequestOutput] = []
    for number in range(9):
        supervisor.submit(_submit(str(number)), delivered.append)
    assert delivered == []


async def test_queued_tokens_are_bounded_but_one_request_always_fits() -> None:
    supervisor = _Supervisor(max_queued_tokens=100)
    delivered: list[RequestOutput] = []
    supervisor.submit(_submit("long", num_tokens=500), delivered.append)
    assert delivered == []
    supervisor.submit(_submit("next"), delivered.append)
    assert delivered[0].error is not None
    assert "--max-queued-tokens is 100" in delivered[0].error.message


async def test_the_first_output_of_an_attempt_says_how_long_it_was_queued() -> None:
    supervisor = _Supervisor()
    delivered: list[RequestOutput] = []
    supervisor.submit(_submit("x"), delivered.append)
    submitted_s = time.monotonic()
    await asyncio.sleep(0.05)
    supervisor._note_started(["x"])
    longest_s = time.monotonic() - submitted_s + 0.01
    await asyncio.sleep(0.05)
    for _ in range(2):
        supervisor._take_step(link.StepOutputs([_output("x")], link.Load()))
    first, second = delivered
    assert first.queue_s is not None
    # Not the time until the output came.
    assert 0.05 <= first.queue_s < longest_s
    assert second.queue_s is None


async def test_so_does_its_last_where_that_is_the_first() -> None:
    supervisor = _Supervisor()
    delivered: list[RequestOutput] = []
    supervisor.submit(_submit("x"), delivered.append)
    supervisor.submit(_submit("y"), delivered.append)
    supervisor._note_started(["x"])
    supervisor.end_all("over")
    began, queued = delivered
    assert began.queue_s is not None
    assert queued.queue_s is None


async def test_an_abort_of_a_lower_attempt_leaves_the_one_that_took_over() -> None:
    supervisor = _Supervisor()
    delivered: list[RequestOutput] = []
    supervisor.submit(_submit("x"), delivered.append)
    supervisor.submit(_submit("x", attempt=1), delivered.append)
    supervisor.abort("x", 0)
    await asyncio.sleep(0)
    assert [(o.attempt, o.finish_reason) for o in delivered] == [(0, FinishReason.ABORTED)]
    assert [abort for inbox in supervisor.sent for abort in inbox.aborts] == []
    supervisor.abort("x", 1)
    await asyncio.sleep(0)
    assert supervisor.sent[-1].aborts == [("x", 1)]


async def test_an_early_abort_is_remembered_for_its_attempt_and_those_before() -> None:
    supervisor = _Supervisor()
    delivered: list[RequestOutput] = []
    supervisor.abort("x", 0)
    supervisor.submit(_submit("x", attempt=0), delivered.append)
    assert [o.finish_reason for o in delivered] == [FinishReason.ABORTED]
    supervisor.submit(_submit("x", attempt=1), delivered.append)
    assert len(delivered) == 1
    assert supervisor.live_attempt("x") == 1


async def test_an_abort_that_overtakes_the_next_attempt_ends_it_and_the_live_one() -> None:
    supervisor = _Supervisor()
    delivered: list[RequestOutput] = []
    supervisor.submit(_submit("x"), delivered.append)
    supervisor.abort("x", 1)
    await asyncio.sleep(0)
    assert supervisor.sent[-1].aborts == [("x", 0)]
    # Whether its engine has ended the live one by then or not.
    supervisor.submit(_submit("x", attempt=1), delivered.append)
    supervisor._take_step(
        link.StepOutputs([_output("x", finish_reason=FinishReason.ABORTED)], link.Load())
    )
    supervisor.submit(_submit("x", attempt=1), delivered.append)
    assert [(o.attempt, o.finish_reason) for o in delivered] == [
        (attempt, FinishReason.ABORTED) for attempt in (1, 0, 1)
    ]
    supervisor.submit(_submit("x", attempt=2), delivered.append)
    assert supervisor.live_attempt("x") == 2


async def test_a_deadline_ends_a_request_although_its_engine_says_nothing() -> None:
    supervisor = _Supervisor()
    delivered: list[RequestOutput] = []
    supervisor.submit(_submit("x"), delivered.append, deadline_s=0.02)
    await asyncio.sleep(0.05)
    assert delivered[0].error is not None
    assert delivered[0].error.code == 4
    assert supervisor.num_live == 0
    assert supervisor.sent[-1].aborts == [("x", 0)]


async def test_a_request_that_ended_has_no_deadline_any_more() -> None:
    supervisor = _Supervisor()
    delivered: list[RequestOutput] = []
    supervisor.submit(_submit("x"), delivered.append, deadline_s=0.01)
    supervisor._take_step(
        link.StepOutputs([_output("x", finish_reason=FinishReason.STOP)], link.Load())
    )
    # Whoever has its id now.
    supervisor.submit(_submit("x"), delivered.append)
    await asyncio.sleep(0.03)
    assert [output.error for output in delivered] == [None]


async def test_the_load_counts_what_the_engine_has_not_looked_at() -> None:
    supervisor = _Supervisor()
    for number in range(5):
        supervisor.submit(_submit(str(number)), lambda output: None)
    assert supervisor.load.waiting == 0
    assert (supervisor.num_waiting, supervisor.queued_tokens) == (5, 15)


# ---- engines that do not start, are gone, or talk nonsense ----


async def test_a_process_that_cannot_be_made_is_a_failed_start_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    monkeypatch.setattr(engine_supervisor, "_FIRST_BACK_OFF_S", 0.001)
    supervisor = _Supervisor(max_restarts=3)
    # The engine before gave tokens: that says nothing of those that cannot be started.
    supervisor._worked = True
    with pytest.raises(EngineFailed, match="3 engines failed in a row: it cannot be started"):
        await asyncio.wait_for(supervisor.run(), 5)
    assert caplog.text.count("the engine cannot be started") == 3
    counted = "penstock_shard_engine_restarts_total"
    assert supervisor.metrics.registry.get_sample_value(counted) == 3


async def test_no_engine_is_started_for_a_shard_that_drains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = _Supervisor(max_restarts=2)
    lives = 0

    async def live() -> str:
        nonlocal lives
        lives += 1
        supervisor._died()
        return "killed by signal 9"

    monkeypatch.setattr(engine_supervisor, "_FIRST_BACK_OFF_S", 0.05)
    monkeypatch.setattr(supervisor, "_run_once", live)
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0.02)
    # In the pause before the second.
    assert lives == 1
    supervisor.drain(hand_over=False)
    await asyncio.sleep(0.1)
    assert lives == 1
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_engine_that_is_gone_while_the_shard_drains_is_no_failed_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = _Supervisor(max_restarts=1)

    async def live() -> str:
        supervisor.drain(hand_over=True)
        supervisor._died()
        return "killed by signal 9"

    monkeypatch.setattr(supervisor, "_run_once", live)
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0.02)
    assert not running.done()
    assert "starting the engine again" not in caplog.text
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_engine_that_makes_no_sense_is_one_that_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor, reader = _Supervisor(), asyncio.StreamReader()
    reader.feed_data(encode_frame(["beat", "not a number", 0.0]))
    reader.feed_data(encode_frame(link.Beat(0.0, 9.0)))
    async with asyncio.timeout(30):
        await supervisor._listen_to(reader)
    assert supervisor._beat.step_expected_s == 0.0
    [record] = caplog.records
    assert "cannot be decoded" in record.getMessage()


# ---- the watchdog, without an engine process ----


class _Process:
    """A process that cannot be killed, like one that waits for a device."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.killed = False

    @property
    def writer(self) -> Any:
        """A writer whose transport, when aborted, closes the server's end of the socket."""
        return SimpleNamespace(transport=SimpleNamespace(abort=self.reader.feed_eof))

    def kill(self) -> None:
        self.killed = True


async def test_requests_of_a_hung_engine_end_though_it_cannot_be_killed() -> None:
    supervisor = _Supervisor(stall_timeout_s=1)
    supervisor._process = process = _Process()  # type: ignore[assignment]
    supervisor._beat_at_s -= 5
    watchdog = asyncio.create_task(supervisor._kill_when_it_hangs())
    async with asyncio.timeout(30):
        await supervisor._listen_to(process.reader)
    assert process.killed
    await watchdog


async def test_a_server_that_was_stopped_hears_its_engine_before_it_judges() -> None:
    supervisor = _Supervisor(stall_timeout_s=1)
    supervisor._process = process = _Process()  # type: ignore[assignment]
    watchdog = asyncio.create_task(supervisor._kill_when_it_hangs())
    await asyncio.sleep(0.05)
    # All of this process stands still, as after SIGSTOP.
    time.sleep(1.5)  # noqa: ASYNC251
    await asyncio.sleep(0.3)
    assert not watchdog.done()
    assert not process.killed
    assert supervisor.beat_age_s < 1
    supervisor._excuse(100.0)
    assert supervisor.beat_age_s >= 0
    async with asyncio.timeout(30):
        await watchdog
    assert process.killed


async def test_a_suspect_s_next_attempt_is_not_refused_for_the_one_before_it() -> None:
    supervisor = _Supervisor()
    outputs: list[RequestOutput] = []
    supervisor.submit(_submit("a", 0), outputs.append, suspect=True)
    supervisor.submit(_submit("a", 1), outputs.append, suspect=True)
    assert [(output.attempt, output.error) for output in outputs] == [(0, None)]
    supervisor.submit(_submit("b"), outputs.append, suspect=True)
    assert outputs[-1].error is not None
    assert "is being tried" in outputs[-1].error.message


async def test_a_suspect_that_gives_tokens_is_none_any_more() -> None:
    supervisor = _Supervisor()
    outputs: list[RequestOutput] = []
    for name in "ab":
        supervisor.submit(_submit(name), outputs.append, suspect=name == "a")
    supervisor._note_started(["a", "b"])
    for position in range(8):
        supervisor.submit(_submit("c", position), outputs.append, suspect=True)
        assert outputs[-1].error is not None
        supervisor._take_step(
            link.StepOutputs([RequestOutput([1], position, request_id="a", attempt=0)], link.Load())
        )
    supervisor.submit(_submit("c", 9), outputs.append, suspect=True)
    assert outputs[-1].error is None
    supervisor._died()
    # Whoever is tried alone, and nobody else, is charged; the one that had begun.
    charged = [output.request_id for output in outputs if output.error and output.error.engine_died]
    assert charged == ["a", "b"]


async def test_a_late_abort_of_an_earlier_attempt_does_not_undo_that_of_a_later_one() -> None:
    supervisor = _Supervisor()
    outputs: list[RequestOutput] = []
    supervisor.abort("a", 1)
    supervisor.abort("a", 0)
    supervisor.submit(_submit("a", 1), outputs.append)
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORTED]
    supervisor.submit(_submit("a", 2), outputs.append)
    assert supervisor.live_attempt("a") == 2


def test_an_early_abort_is_forgotten_after_half_a_minute() -> None:
    times_s = iter([100.0, 129.0, 131.0])
    aborts = EarlyAborts(lambda: next(times_s))
    aborts.remember("a", 0)
    assert aborts.include("a", 0)
    assert not aborts.include("a", 0)


async def test_outputs_of_an_attempt_that_another_took_over_from_reach_nobody() -> None:
    supervisor = _Supervisor()
    outputs: list[RequestOutput] = []
    for attempt in (0, 1):
        supervisor.submit(_submit("a", attempt), outputs.append)
    late = [
        RequestOutput([1], 0, request_id="a", attempt=0),
        _output("a", 0, finish_reason=FinishReason.ABORTED),
    ]
    supervisor._take_step(link.StepOutputs(late, link.Load()))
    assert [(output.attempt, output.finish_reason) for output in outputs] == [
        (0, FinishReason.ABORTED)
    ]
    assert supervisor.live_attempt("a") == 1


async def test_what_waits_to_be_sent_to_an_engine_dies_with_it() -> None:
    supervisor = _Supervisor()
    outputs: list[RequestOutput] = []
    for name in "ab":
        supervisor.submit(_submit(name), outputs.append)
    supervisor.abort("a", 0)
    supervisor._died()
    await asyncio.sleep(0)
    assert [(inbox.requests, inbox.aborts) for inbox in supervisor.sent] == [([], [])]
    assert [output.request_id for output in outputs if output.error is not None] == ["a", "b"]


async def test_each_engine_has_an_id_of_its_own() -> None:
    supervisor = _Supervisor()
    first = supervisor.instance_id
    supervisor._died()
    supervisor._became_ready(link.Ready(runner_info(), {}, "", ""))
    assert supervisor.instance_id != first


async def test_an_engine_hangs_whose_step_takes_many_times_what_such_steps_do() -> None:
    supervisor = _Supervisor(stall_timeout_s=1)
    for running_s, expected_s, hangs in (
        (0.9, 0.01, False),
        (1.1, 0.01, True),
        (1.1, 0.5, False),
        (5.1, 0.5, True),
        (100.0, 0.0, False),
    ):
        supervisor._beat = link.Beat(running_s, expected_s)
        assert supervisor.hangs == hangs


async def test_an_attempt_that_takes_over_takes_the_place_too() -> None:
    supervisor = _Supervisor(max_num_seqs=1, max_queued_requests=1)
    outputs: list[RequestOutput] = []
    for name, attempt in (("a", 0), ("b", 0), ("c", 0), ("a", 1)):
        supervisor.submit(_submit(name, attempt), outputs.append)
    refused = [output.request_id for output in outputs if output.error is not None]
    assert refused == ["c"]
    assert supervisor.live_attempt("a") == 1


# ---- calls, without an engine process ----


def _message(request_id: str, attempt: int = 0) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=request_id, attempt=attempt, prompt_token_ids=[7])


class _Context:
    """Keeps with what a call was ended."""

    ended: tuple[grpc.StatusCode, str] | None = None

    def __init__(self, **certificate: list[bytes]) -> None:
        self._certificate = certificate

    async def abort(self, status: grpc.StatusCode, text: str) -> None:
        self.ended = status, text

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._certificate


async def test_callers_whose_certificates_have_no_name_have_request_ids_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Certificates tell such callers apart; gRPC shows the same empty name for each."""
    supervisor = _Supervisor()
    ids: list[str] = []
    monkeypatch.setattr(supervisor, "abort", lambda request_id, attempt: ids.append(request_id))
    contexts = [
        _Context(),
        *(_Context(x509_common_name=[b""], x509_pem_cert=[pem]) for pem in (b"one", b"two")),
        *(_Context(x509_pem_cert=[pem]) for pem in (b"three", b"four")),
        _Context(x509_common_name=[b"router"], x509_pem_cert=[b"five"]),
    ]
    servicer = ShardServicer(supervisor, ShardConfig())
    for context in contexts:
        await servicer.Abort(pb.AbortRequest(request_ids=["known"]), cast("Any", context))
    assert ids[0] == "known"
    assert len(set(ids)) == len(contexts)
    assert all(request_id.endswith("/known") for request_id in ids[1:])


async def test_an_attempt_is_not_left_alone_when_the_next_one_is_refused() -> None:
    supervisor = _Supervisor()

    async def messages() -> AsyncIterator[pb.GenerateRequest]:
        yield _message("a")
        supervisor.draining = True
        yield _message("a", attempt=1)

    outputs = ShardServicer(supervisor, ShardConfig()).Generate(messages(), cast("Any", _Context()))
    refused = await anext(outputs)
    assert [(output.attempt, output.error.code) for output in refused.outputs] == [(1, 14)]
    reading = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0.01)
    supervisor._take_step(
        link.StepOutputs([_output("a", finish_reason=FinishReason.STOP)], link.Load())
    )
    async with asyncio.timeout(30):
        ended = await reading
    assert [(output.attempt, output.HasField("finish")) for output in ended.outputs] == [(0, True)]


async def test_a_call_whose_requests_cannot_be_taken_ends_and_so_do_they(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, context = _Supervisor(), _Context()

    async def messages() -> AsyncIterator[pb.GenerateRequest]:
        yield _message("a")
        monkeypatch.setattr(codec, "submission", lambda message: 1 // 0)
        yield _message("b")

    call = ShardServicer(supervisor, ShardConfig()).Generate(messages(), cast("Any", context))
    async with asyncio.timeout(30):
        assert [response async for response in call] == []
    assert context.ended == (grpc.StatusCode.INTERNAL, "the shard failed: ZeroDivisionError")
    assert caplog.records[-1].exc_info is not None
    await asyncio.sleep(0)
    assert supervisor.sent[-1].aborts == [("a", 0)]


async def test_the_last_report_of_a_drain_is_of_nothing_though_its_end_came_meanwhile() -> None:
    supervisor = _Supervisor()
    supervisor.submit(_submit("a"), lambda output: None)
    servicer = ShardServicer(supervisor, ShardConfig())
    reports = servicer.Drain(pb.DrainRequest(), cast("Any", _Context()))
    first = await anext(reports)
    assert first.running + first.waiting == 1
    supervisor._take_step(
        link.StepOutputs([_output("a", finish_reason=FinishReason.STOP)], link.Load())
    )
    last = [report async for report in reports][-1]
    assert (last.running, last.waiting) == (0, 0)
