"""The messages of one shard, read without a fleet, which would hide some of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from histories.reading import Line, Reading

from penstock_client import GenerationRequest, SamplingParams, ShardClient
from penstock_proto import shard_pb2 as pb
from penstock_proto.shard_pb2_grpc import ShardStub

_PROMPT = list(range(5, 45))
_TOKENS = 60
_END_S = 20.0
# After this many tokens of an attempt, a higher attempt takes over.
_BEGUN_TOKENS = 10


async def taken_over(address: str) -> dict[str, Line]:
    """A client's attempt that a higher one of the same client takes over from: outputs of the
    lower, its end too, are none of the higher.
    """
    request = GenerationRequest(
        _PROMPT, SamplingParams(seed=3), max_tokens=_TOKENS, ignore_eos=True, logprobs=1
    )
    async with ShardClient(address) as client:
        low = client.submit(request, request_id="taken over", attempt=0)
        await anext(low)
        high = Reading("", client.submit(request, request_id="taken over", attempt=2))
        await high.read()
        high.look_again()
    return {"client: the attempt that took over": high.line(ends=1)}


async def on_the_wire(address: str) -> dict[str, Line]:
    """Return a line each for an attempt and for a higher one that takes over from it."""
    async with grpc.aio.insecure_channel(address) as channel:
        call, outputs = ShardStub(channel).Generate(), list[pb.Output]()  # type: ignore[no-untyped-call]
        # A call that never ends has no end in its line.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                async for output in _outputs(call):
                    outputs.append(output)
    low, high = ([each for each in outputs if each.attempt == attempt] for attempt in (0, 2))
    line = _line(low)
    # How far the lower attempt came depends on the clock.
    del line["token_ids"]
    after = outputs[outputs.index(high[0]) :] if high else []
    line["late"] += sum(bool(output.token_ids) for output in after if output.attempt == 0)
    return {"wire: the lower attempt": line, "wire: the higher attempt": _line(high)}


async def _outputs(call: Any) -> AsyncIterator[pb.Output]:
    await call.write(_message(0))
    has_written_both, num_tokens = False, 0
    while (response := await call.read()) is not grpc.aio.EOF:
        for output in response.outputs:
            yield output
            num_tokens += len(output.token_ids)
        if num_tokens >= _BEGUN_TOKENS and not has_written_both:
            await call.write(_message(2))
            await call.done_writing()
            has_written_both = True


def _message(attempt: int) -> pb.GenerateRequest:
    """A request without a number: all of its outputs come whole."""
    return pb.GenerateRequest(
        request_id="on the wire",
        attempt=attempt,
        prompt_token_ids=_PROMPT,
        sampling=pb.SamplingParams(seed=4),
        stop=pb.StopConditions(max_tokens=_TOKENS, ignore_eos=True),
    )


def _line(outputs: list[pb.Output]) -> Line:
    token_ids, ends, num_gaps, num_late = list[int](), list[str](), 0, 0
    for output in outputs:
        num_late += bool(ends)
        num_gaps += bool(output.token_ids) and output.first_position != len(token_ids)
        token_ids += output.token_ids
        if output.WhichOneof("end"):
            ends.append(f"{output.WhichOneof('end')} {output.finish.reason} {output.error.code}")
    return {
        "token_ids": token_ids,
        "finish": ends,
        "ends": [len(ends)],
        "gaps": num_gaps,
        "late": num_late,
    }
