"""Checks a shard's API key before any message of a call is parsed.

A message may have 64 MB and take a gigabyte once parsed: strangers must not get that far. Knows no
message and no service.
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
    """Ends calls to one service without the key. Calls to others pass: probes have no key."""

    def __init__(self, key: str, service: str) -> None:
        self._expected = f"Bearer {key}".encode()
        self._methods = f"/{service}/"
        # For unary calls too: of a stream, nothing is read until the handler asks for it.
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
        """Compares in constant time, so that timing does not leak the key."""
        metadata = dict(call.invocation_metadata or ())
        given = str(metadata.get("authorization", ""))
        return hmac.compare_digest(given.encode(), self._expected)


async def _refuse(requests: object, context: Any) -> None:
    # gRPC clients may lose a status that arrives while they still send: wait briefly for the first
    # message.
    reading = asyncio.ensure_future(context.read())
    await asyncio.wait((reading,), timeout=_FIRST_MESSAGE_S)
    reading.cancel()
    # gRPC keeps the abort's exception in a reference cycle, and with it this frame's variables.
    del reading
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong API key")
