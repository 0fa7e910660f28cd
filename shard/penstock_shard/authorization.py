"""The API key of a shard, asked for before anything of a call is read.

A message may have 64 MB, and become a gigabyte once it is parsed: not for strangers. Knows no
message and no service.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

# gRPC's own type is generic for type checkers only.
Handler = Any


class KeyCheck(grpc.aio.ServerInterceptor):
    """Ends calls to one service that do not bear the key; others pass, as probes must."""

    def __init__(self, key: str, service: str) -> None:
        self._expected = f"Bearer {key}".encode()
        self._methods = f"/{service}/"
        # Of a stream nothing is read until a handler asks for it.
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


async def _refuse(requests: AsyncIterator[Any], context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong API key")
