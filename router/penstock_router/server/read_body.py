"""Receives the bodies of requests, within bounds of size and time, and inflates them."""

from __future__ import annotations

import asyncio
import functools
import itertools

from aiohttp import HttpVersion11, StreamReader, web

from penstock_router.errors import (
    BadRequest,
    BodyTooLarge,
    Forbidden,
    TimedOut,
)
from penstock_router.json_fields import JsonObject, decode_object, shorten
from penstock_router.offload.dispatch import Bodies, Incoming
from penstock_router.server.caller import client_of
from penstock_router.server.content_coding import DAMAGED, Inflater, inflater_of
from penstock_router.server.parts import ROUTER

# The longest body of a route that takes only a few fields.
_MAX_PLAIN_BYTES = 64 * 1024
# A body may fall behind the slowest transfer, or pause, for this long, because the arrived part
# takes memory meanwhile. Bytes that came early do not allow a longer pause later.
_MAX_PAUSE_S = 60.0
_MIN_BYTES_A_SECOND = 8192
# Inflating this much takes a fraction of a millisecond, even if it is only empty gzip members.
_SHORT_PACKED_BYTES = 4096
# Bytes inflated at a time on the event loop.
_INFLATED_HERE_BYTES = 64 * 1024
# A thread inflates this many pieces of this size at a time, in a few milliseconds. It holds the
# interpreter lock while the memory of a piece is prepared.
_PIECES_A_TURN = 8
_PIECE_BYTES = 128 * 1024


async def read_object(request: web.Request, *, any_type: bool = False) -> JsonObject:
    """Read a JSON object on a route with short bodies. See `BodyKind.any_type`."""
    check_content_type(request, any_type=any_type)
    with request.app[ROUTER].bodies.incoming(client_of(request)) as incoming:
        await receive_body(request, incoming, _MAX_PLAIN_BYTES)
        return decode_object(b"".join(incoming.pieces))


async def receive_body(request: web.Request, incoming: Incoming, max_bytes: int) -> None:
    """Receive the whole body of the request, and inflate it."""
    inflater = inflater_of(request.headers.getall("Content-Encoding", ()))
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    _say_continue(request)
    router, loop = request.app[ROUTER], asyncio.get_running_loop()
    until_s = loop.time() + _MAX_PAUSE_S
    try:
        while piece := await _next_piece(request.content, until_s):
            until_s += len(piece) / _MIN_BYTES_A_SECOND
            until_s = min(until_s, loop.time() + _MAX_PAUSE_S)
            if inflater is None:
                _add(incoming, piece, max_bytes)
            else:
                inflater.feed(piece)
                is_short = len(piece) <= _SHORT_PACKED_BYTES
                while data := await _inflate(router.bodies, inflater, is_short, incoming):
                    for each in data:
                        _add(incoming, each, max_bytes)
            if incoming.is_long:
                await router.bodies.take_turn()
    except web.RequestPayloadError:
        raise BadRequest(DAMAGED) from None
    if inflater is not None:
        inflater.end()


def check_content_type(request: web.Request, *, any_type: bool) -> None:
    """Refuse a body whose type is not JSON, unless `any_type`. Also refuse one of another type from
    a page of another origin, because browsers ask for permission only before they send JSON.
    """
    given = request.headers.get("Content-Type")
    if given is not None and _is_json(request.content_type):
        return
    if given is not None and not any_type:
        raise BadRequest(
            f"Content-Type must be application/json, not {shorten(given)}; with curl: "
            "-H 'Content-Type: application/json'"
        )
    if not _is_welcome(request):
        origin = shorten(request.headers.get("Origin"))
        raise Forbidden(
            f"Origin: pages of {origin} may not send this (--cors-origin), or only as "
            "Content-Type application/json"
        )


def _is_welcome(request: web.Request) -> bool:
    """Return False for a request from a page of an origin that is neither this router's nor
    allowed by the operator.
    """
    origin, allowed = request.headers.get("Origin"), request.app[ROUTER].config.cors_origins
    if origin is None or "*" in allowed or origin in allowed:
        return True
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and host.lower() == request.headers.get("Host", "").lower()


def _say_continue(request: web.Request) -> None:
    """Answer `Expect: 100-continue`: the client waits for this before it sends the body."""
    waits = request.headers.get("Expect", "").lower() == "100-continue"
    if waits and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _add(incoming: Incoming, piece: bytes, max_bytes: int) -> None:
    incoming.add(piece)
    if incoming.num_bytes > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes")


async def _inflate(
    bodies: Bodies, inflater: Inflater, is_short: bool, incoming: Incoming
) -> list[bytes]:
    """Return the next inflated bytes, in pieces. Inflate in a thread if it may take longer than
    starting one.
    """
    if is_short and not incoming.is_long:
        return _inflate_pieces(inflater, 1, _INFLATED_HERE_BYTES)
    inflate = functools.partial(_inflate_pieces, inflater, _PIECES_A_TURN, _PIECE_BYTES)
    return await bodies.inflate(inflate)


def _inflate_pieces(inflater: Inflater, num_pieces: int, piece_bytes: int) -> list[bytes]:
    pieces = iter(functools.partial(inflater.inflate, piece_bytes), b"")
    return list(itertools.islice(pieces, num_pieces))


async def _next_piece(content: StreamReader, until_s: float) -> bytes:
    """Return bytes that have arrived or arrive by `until_s`; empty at the end."""
    # A timeout costs as much as all else here.
    if (piece := content.read_nowait()) or content.at_eof():
        return piece
    try:
        async with asyncio.timeout_at(until_s):
            return await content.readany()
    except TimeoutError:
        raise TimedOut("the body comes too slowly") from None


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")
