"""The API key of a shard, asked for before any message of a call is parsed.

One may have 64 MB, and take a gigabyte once it is parsed: not for strangers. Knows no message and
no service.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

_FIRST_MESSAGE_S = 1.0
# gRPC's own type is generic for type checkers only.
Handler = Any


class KeyCheck(grpc.aio.ServerInterceptor):
    """Ends calls to one service that do not bear the key; others pass, as probes must."""

    def __init__(self, key: str, service: str) -> None:
        self._expected = f"Bearer {key}".encode()
        self._methods = f"/{service}/"
        # Whatever kind of call it is: of streams nothing is read until a handler asks for it.
        self._refuse: Handler = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        called = handler_call_details.method
        if not called.startswith(self._methods) or self._bears_key(handler_call_details):
            return await continuation(handler_call_details)
        return self._refuse

    def _bears_key(self, call: grpc.HandlerCallDetails) -> bool:
        """In constant time: the key must not leak."""
        metadata = dict(call.invocation_metadata or ())
        given = str(metadata.get("authorization", ""))
        return hmac.compare_digest(given.encode(), self._expected)


async def _refuse(requests: object, context: Any) -> None:
    # gRPC's clients hear nothing of a status that comes while they send; a message should follow at
    # once.
    reading = asyncio.ensure_future(context.read())
    await asyncio.wait((reading,), timeout=_FIRST_MESSAGE_S)
    reading.cancel()
    # gRPC keeps how a call was aborted in a circle, and with it all that is at hand here.
    del reading
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong API key")
