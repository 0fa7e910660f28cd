"""Checks a shard's API key before any message of a call is received.

A message may have 64 MB and take a gigabyte once parsed, so messages of callers without a key are
not received. Probes have no key: their health checks are received, but parsed only if small.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from penstock_proto.codec.kv import KV_SERVICE_NAME

_PROBE = "/grpc.health.v1.Health/Check"
# A health check contains a service's name, and arrives in one packet with its call.
_MAX_PROBE_BYTES = 1024
_PROBE_S = 0.5
# One address may be sending at most this many health checks at once.
_MAX_PROBES = 4
# Time for a caller to send its first message before the refusal. A refusal that interrupts a write
# is an internal error for gRPC clients.
_PATIENCE_S = 0.1
# gRPC's type is generic only for type checkers.
Handler = Any


class KeyCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the key, except health checks. Peers' calls need the peer key."""

    def __init__(self, key: str | None, peer_key: str | None = None) -> None:
        """Without `key`, every client may call."""
        self._expected = None if key is None else f"Bearer {key}".encode()
        self._of_peers = None if peer_key is None else f"Bearer {peer_key}".encode()
        # Used for unary calls too: the handler of a stream receives no message until it asks for
        # one.
        self._refuse: Handler = grpc.stream_stream_rpc_method_handler(_refuse)
        # Health checks being received, by address.
        self._probes: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        if self._bears_key(handler_call_details):
            return await continuation(handler_call_details)
        if handler_call_details.method != _PROBE:
            return self._refuse
        check = await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(
            functools.partial(self._probe, check), response_serializer=check.response_serializer
        )

    def _bears_key(self, call: grpc.HandlerCallDetails) -> bool:
        """Tell whether the call has the right key. Compares in constant time, so that timing does
        not leak it.
        """
        is_for_peers = call.method.startswith(f"/{KV_SERVICE_NAME}/")
        expected = self._of_peers if is_for_peers else self._expected
        if expected is None:
            return not is_for_peers
        metadata = dict(call.invocation_metadata or ())
        given = str(metadata.get("authorization", ""))
        return hmac.compare_digest(given.encode(), expected)

    async def _probe(self, check: Handler, messages: object, context: Any) -> None:
        address = context.peer().rpartition(":")[0]
        if self._probes[address] >= _MAX_PROBES:
            _end(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health checks at once")
            return
        self._probes[address] += 1
        try:
            message = await _small(context)
        finally:
            self._probes[address] -= 1
            if not self._probes[address]:
                del self._probes[address]
        if message is None:
            text = f"a health check has at most {_MAX_PROBE_BYTES} bytes, and comes at once"
            _end(context, grpc.StatusCode.INVALID_ARGUMENT, text)
            return
        answer = await check.unary_unary(message, context)
        if answer is not None:
            await context.write(answer)


async def _small(context: Any) -> bytes | None:
    """Return the first message; None if it is large or takes longer than `_PROBE_S`."""
    receiving = asyncio.ensure_future(context.read())
    await asyncio.wait((receiving,), timeout=_PROBE_S)
    if receiving.cancel():
        return None
    message: bytes = receiving.result()
    return message if isinstance(message, bytes) and len(message) <= _MAX_PROBE_BYTES else None


async def _refuse(requests: object, context: Any) -> None:
    await asyncio.sleep(_PATIENCE_S)
    _end(context, grpc.StatusCode.UNAUTHENTICATED, "missing or wrong API key")


def _end(context: Any, code: grpc.StatusCode, text: str) -> None:
    """Set the status with which the call ends once its handler returns. `context.abort` would raise
    an exception in a reference cycle, which would keep the call's messages in memory.
    """
    context.set_code(code)
    context.set_details(text)
