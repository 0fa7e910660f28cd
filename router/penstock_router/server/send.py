"""Sends whole answers, and counts long ones as memory that their client holds."""

from __future__ import annotations

import asyncio
import functools

import msgspec
from aiohttp import Payload, web
from aiohttp.abc import AbstractStreamWriter

from penstock_router.apis.json_in_thread import cut
from penstock_router.errors import (
    TooManyRequests,
)
from penstock_router.observe.metrics import Metrics
from penstock_router.server.caller import client_of
from penstock_router.server.connections import end_answer
from penstock_router.server.parts import ROUTER
from penstock_router.server.write_timeout import write_timeout_of

# An answer of more bytes counts as memory that its client holds.
LONG_ANSWER_BYTES = 64 * 1024


def json_response(body: object, status: int = 200) -> web.Response:
    """Make an answer of JSON."""
    return encoded_response(msgspec.json.encode(body), status)


def encoded_response(data: bytes, status: int = 200) -> web.Response:
    """Make an answer of encoded JSON."""
    return web.Response(body=data, status=status, content_type="application/json")


async def send(request: web.Request, response: web.StreamResponse) -> None:
    """Send a whole answer, and return when the client has taken all of it. Until then a long answer
    counts as memory that the client holds. A stream, which is being sent already, is left alone.

    Raises `TooManyRequests` before anything is sent, and `ConnectionError`.
    """
    if response.prepared:
        return
    router, num_bytes = request.app[ROUTER], _num_bytes(response)
    with router.memory.hold(client_of(request)) as held:
        if num_bytes > LONG_ANSWER_BYTES:
            held.grow(num_bytes, functools.partial(too_much_unread, router.metrics, num_bytes))
            _divide(response)
        if not request.content.is_eof():
            # Nothing is read after a body that was not read.
            response.force_close()
        await response.prepare(request)
        await end_answer(request, response)
        await write_timeout_of(request.transport).wait_sent()


def _divide(response: web.StreamResponse) -> None:
    if isinstance(response, web.Response) and isinstance(response.body, bytes):
        response.body = _Divided(response.body)


class _Divided(Payload):
    """A long body that is written in pieces, because over TLS all bytes of one write count as sent.
    aiohttp's payload for `BytesIO` copies the whole body first.
    """

    _value: bytes

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in cut(memoryview(self._value)):
            await asyncio.sleep(0)
            await writer.write(piece)


def _num_bytes(response: web.StreamResponse) -> int:
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes) else 0


def too_much_unread(
    metrics: Metrics, num_bytes: int, held_bytes: int, max_bytes: int
) -> TooManyRequests:
    """Make the refusal of an answer that exceeds the client's share of memory now."""
    metrics.refused.labels("unread_answers").inc()
    return TooManyRequests(
        f"this answer takes {num_bytes} bytes, and the server holds {held_bytes} for this client "
        f"already (of {max_bytes} for all); read the answers before it, then try again"
    )
