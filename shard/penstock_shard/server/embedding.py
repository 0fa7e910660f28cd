"""The vectors of one Embed call: all of them or none."""

from __future__ import annotations

import asyncio
from collections import abc

from penstock_shard.ipc.codes import Code
from penstock_shard.ipc.messages import Error, Output
from penstock_shard.ipc.request import Request
from penstock_shard.server.supervisor import EngineSupervisor
from penstock_shard.server.validation import Refusal


async def embed(engine: EngineSupervisor, requests: abc.Sequence[Request]) -> list[bytes]:
    """The vectors of these requests, in their order. Cancellation aborts those that are live.

    Raises:
        Refusal: one of the requests failed; the others are aborted.
    """
    call = _Call(len(requests))
    try:
        for request in requests:
            if not call.ended.done():
                call.live[request.request_id] = None
                engine.submit(request, call.take)
        await call.ended
    finally:
        for request_id in list(call.live):
            engine.abort(request_id, 0)
    return [call.vectors[request.request_id] for request in requests]


class _Call:
    """The progress of one call's requests."""

    def __init__(self, count: int) -> None:
        # A set in the order in which they came.
        self.live: dict[str, None] = {}
        self.vectors: dict[str, bytes] = {}
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count = count

    def take(self, output: Output) -> None:
        if not output.is_last:
            return
        self.live.pop(output.request_id, None)
        if output.embedding is not None:
            self.vectors[output.request_id] = output.embedding
        if self.ended.done():
            return
        if output.embedding is None:
            error = output.error or Error(Code.UNAVAILABLE, "the request was ended by the shard")
            self.ended.set_exception(Refusal.of(error))
        elif len(self.vectors) == self._count:
            self.ended.set_result(None)
