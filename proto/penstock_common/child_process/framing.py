"""Messages between processes: msgpack after its length, which is sent twice.

The second length has all bits inverted, so that a receiver notices a wrong length and does not wait
for bytes that never come.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    # Not for the process that checks constraints, which is small.
    import asyncio

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<II")
HEADER_BYTES = _HEADER.size
_ALL_BITS = 2**32 - 1
# Bytes sent, received or copied between two turns of an event loop.
PIECE_BYTES = 256 * 1024

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Any) -> bytes:
    """Encode a message, with its length before it."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body), len(body) ^ _ALL_BITS) + body


def receive_frame(read: Callable[[int], bytes]) -> bytes | None:
    """Return the next message's msgpack; None if the other end is gone or sent something else.

    `read` returns as many bytes as it is asked for, and fewer only at the end, as `exactly` does.
    """
    header = read(HEADER_BYTES)
    length = decode_header(header) if len(header) == HEADER_BYTES else None
    if length is None:
        return None
    body = read(length)
    return body if len(body) == length else None


def exactly(connection: socket.socket) -> Callable[[int], bytes]:
    """Make a `read` for `receive_frame` from a blocking socket."""

    def read(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                piece = connection.recv(min(count - len(data), PIECE_BYTES))
            except ConnectionError:
                break
            if not piece:
                break
            data += piece
        return bytes(data)

    return read


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return what `receive_frame` returns."""
    try:
        length = decode_header(await reader.readexactly(HEADER_BYTES))
        return None if length is None else await reader.readexactly(length)
    except (EOFError, ConnectionError):
        return None


def decode_header(header: bytes) -> int | None:
    """Return the length of the message that follows a header; None if it is no header."""
    length, turned = _HEADER.unpack(header)
    if length ^ turned == _ALL_BITS:
        return int(length)
    logger.error(
        "a message of another process cannot be decoded: %s is no length; is it of another "
        "version?",
        header.hex(),
    )
    return None
