"""What server and engine say to each other survives the way."""

from __future__ import annotations

import asyncio
import socket

from support.engines import runner_info

from penstock_shard import link
from penstock_shard.config import ShardConfig
from penstock_shard.request import FinishReason, Objective, SamplingParams
from penstock_shard.runner.base import Logprobs

SUBMIT = link.Submit(
    "id", 2, b"\x01\x00\x00\x00", b"",
    SamplingParams(
        0.5, 3, 0.25, 0.1, 2**64 - 1, (1, 2), 0.9, 1.1, 0.5, -0.5, ((3, 1.5),), ((1,), (2, 3))
    ),
    7, [5], 0, None, "salt", 4, (9,), Objective(-1, 2.0, 0.5, 0.25, True),
)  # fmt: skip


def test_messages_to_the_engine_arrive_as_they_were_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine_end = link.EngineEnd(theirs)
        for message in (link.Start(ShardConfig(model="m")), link.Inbox([SUBMIT], [("other", 1)])):
            ours.sendall(link.encode_frame(message))
            assert engine_end.receive() == message


def test_a_server_that_is_gone_is_none() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(b"\x08\x00\x00\x00half")
        ours.close()
        assert link.EngineEnd(theirs).receive() is None


async def test_messages_from_the_engine_arrive_as_they_were_sent() -> None:
    output = link.Output(
        "id",
        1,
        4,
        [7],
        Logprobs([-0.5], [1], 1, [7], [-0.5], [-2.0]),
        None,
        1,
        3,
        FinishReason.STOP,
        7,
    )
    failed = link.Output("other", 0, 0, [], error=link.Error(3, "why", "f", "v", "b"))
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
