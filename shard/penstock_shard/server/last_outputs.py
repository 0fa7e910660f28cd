"""Collects the last output of each of a call's requests, or fails if one fails; and vectors."""

from __future__ import annotations

import asyncio
from collections import abc

import numpy as np

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import EmbeddingRequest, Error, FinishReason, RequestOutput
from penstock_shard.server.supervisor import EngineSupervisor
from penstock_shard.server.validation import Refusal


async def last_outputs(
    engine: EngineSupervisor, requests: abc.Sequence[EngineRequest]
) -> list[RequestOutput]:
    """Return the last output of each request, in order. Cancellation aborts the live requests.

    Raises:
        Refusal: one of the requests failed; the others are aborted.
    """
    outputs: dict[str, asyncio.Future[RequestOutput]] = {}

    def take(output: RequestOutput) -> None:
        last = outputs[output.request_id]
        if last.done() or not output.is_last:
            return
        if output.error is None and output.finish_reason is not FinishReason.ABORTED:
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


def vector_of(output: RequestOutput, asked: EmbeddingRequest) -> list[float]:
    """Return an output's vector cut to the wanted dimensions, of length 1 if that is asked for."""
    values = np.frombuffer(output.embedding or b"", dtype="<f4")[: asked.dimensions]
    values = values.astype(np.float64)
    if asked.normalize:
        # A zero vector stays zero.
        values = values / (np.linalg.norm(values) or 1.0)
    vector: list[float] = values.tolist()
    return vector
