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
    vectors: dict[str, asyncio.Future[bytes]] = {}

    def take(output: Output) -> None:
        vector = vectors[output.request_id]
        if vector.done() or not output.is_last:
            return
        if output.embedding is not None:
            vector.set_result(output.embedding)
        else:
            error = output.error or Error(Code.UNAVAILABLE, "the request was ended by the shard")
            vector.set_exception(Refusal.of(error))

    try:
        for request in requests:
            vector = vectors[request.request_id] = asyncio.get_running_loop().create_future()
            engine.submit(request, take)
            if vector.done():
                # It was refused.
                break
        return await asyncio.gather(*vectors.values())
    finally:
        for request_id, vector in vectors.items():
            if vector.cancelled() or not vector.done():
                engine.abort(request_id, 0)
