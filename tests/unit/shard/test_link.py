"""The link between server and engine: what each says arrives as it was sent."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from support.engines import runner_info
from support.scores import logprobs_of

from penstock_common.child_process.framing import encode_frame
from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import EngineSampling, Error, FinishReason, Objective, RequestOutput
from penstock_shard.config import ShardConfig
from penstock_shard.ipc import messages as link

REQUEST = EngineRequest(
    request_id="id",
    attempt=2,
    prompt=b"\x01\x00\x00\x00",
    sampling=EngineSampling(
        0.5, 3, 0.25, 0.1, 2**64 - 1, (1, 2), 0.9, 1.1, 0.5, -0.5, ((3, 1.5),), ((1,), (2, 3))
    ),
    max_tokens=7,
    min_tokens=4,
    stop_token_ids=frozenset({5}),
    logprobs=0,
    logprob_token_ids=(9,),
    cache_salt="salt",
    objective=Objective(-1, 2.0, 0.5, 0.25, True),
)


def test_messages_to_the_engine_arrive_as_they_were_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine_end = link.EngineEnd(theirs)
        for message in (link.Start(ShardConfig(model="m")), link.Inbox([REQUEST], [("other", 1)])):
            ours.sendall(encode_frame(message))
            assert engine_end.receive() == message


def test_a_server_that_is_gone_is_none() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(encode_frame(link.Inbox([], []))[:-1])
        ours.close()
        assert link.EngineEnd(theirs).receive() is None


@pytest.mark.parametrize(
    "body", [b"\xc1", b"\x93\xa5inbox\x01\x02", b"\x91\xa1\xff", b""], ids=bytes.hex
)
async def test_what_makes_no_sense_is_the_end_of_the_link_and_one_line_of_the_log(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await _means_the_end(_header(len(body)) + body, caplog)


@pytest.mark.parametrize("bit", [0, 17, 31, 32, 63])
async def test_a_length_that_is_not_the_senders_is_the_end_and_not_waited_for(
    bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    frame = bytearray(encode_frame(link.Beat(0.5, 3)))
    frame[bit // 8] ^= 1 << bit % 8
    # Nobody closes the link: more might come.
    await _means_the_end(bytes(frame), caplog)


async def test_what_comes_after_half_a_message_is_no_beginning_of_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = encode_frame(link.Inbox([REQUEST], []))
    await _means_the_end(whole[11:], caplog)


def _header(length: int) -> bytes:
    return struct.pack("<II", length, length ^ 0xFFFFFFFF)


async def _means_the_end(frame: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Check that the frame ends the link at both ends, and that both log an error."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(10)
        ours.sendall(frame)
        assert link.EngineEnd(theirs).receive() is None
    reader = asyncio.StreamReader()
    reader.feed_data(frame)
    async with asyncio.timeout(10):
        assert await link.receive_from_engine(reader) is None
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


async def test_messages_from_the_engine_arrive_as_they_were_sent() -> None:
    output = RequestOutput(
        [7],
        4,
        request_id="id",
        attempt=1,
        logprobs=logprobs_of([-0.5], [1], 1, [(7, -0.5)], [-2.0]),
        prompt_logprobs=None,
        prompt_logprobs_start=1,
        cached_tokens=3,
        finish_reason=FinishReason.STOP,
        stop_token_id=7,
    )
    error = Error(Code.INVALID_ARGUMENT, "why", "f", "v", "b")
    failed = RequestOutput([], 0, request_id="other", attempt=0, error=error)
    messages: list[link.FromEngine] = [
        link.Progress("loading"),
        link.Ready(runner_info(), {"tokenizer.json": b"{}"}, "hash", "abc"),
        link.StepOutputs([output, failed], link.Load(running=1, steps_total=9)),
        link.Beat(0.5, 3),
        link.LoadFailed("no"),
    ]
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    with theirs:
        engine_end = link.EngineEnd(theirs)
        for message in messages:
            engine_end.send(message)
            assert await link.receive_from_engine(reader) == message
    assert await link.receive_from_engine(reader) is None
    writer.close()
    await writer.wait_closed()
