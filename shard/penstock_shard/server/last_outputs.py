"""Collects the last output of each of a call's requests, or fails if one fails."""

from __future__ import annotations

import asyncio
from collections import abc

from penstock_proto.errors import Code
from penstock_shard.ipc.messages import Error, Output
from penstock_shard.ipc.request import FinishReason, Request
from penstock_shard.server.supervisor import EngineSupervisor
from penstock_shard.server.validation import Refusal


async def last_outputs(engine: EngineSupervisor, requests: abc.Sequence[Request]) -> list[Output]:
    """Return the last output of each request, in order. Cancellation aborts the live requests.

    Raises:
        Refusal: one of the requests failed; the others are aborted.
    """
    outputs: dict[str, asyncio.Future[Output]] = {}

    def take(output: Output) -> None:
        last = outputs[output.request_id]
        if last.done() or not output.is_last:
            return
        if output.error is None and output.finish is not FinishReason.ABORTED:
            last.set_result(output)
        else:
            error = output.error or Error(Code.UNAVAILABLE, "the request was ended by the shard")
            last.set_exception(Refusal.of(error))

    try:
        for request in requests:
            last = outputs[request.request_id] = asyncio.get_running_loop().create_future()
            engine.submit(request, take)
            if last.done():
                break
        return await asyncio.gather(*outputs.values())
    finally:
        for request_id, last in outputs.items():
            if last.cancelled() or not last.done():
                engine.abort(request_id, 0)
