"""Bytes of an image as they come in: counted, charged to their client, and gathered in pieces."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable

from penstock_router.images.image import ImageRefused, Pieces

# How much is worked on between two turns of the event loop: a few tenths of a millisecond.
PIECE_BYTES = 128 * 1024
_SMALL_BYTES = PIECE_BYTES // 2
# Of base64, in which four characters are three bytes.
_PIECE_CHARS = PIECE_BYTES
# Of what stands before a data URL's comma, which says nothing that is believed.
_MAX_HEAD_CHARS = 200


class Incoming:
    """An encoded image, as far as it has come."""

    def __init__(self, max_bytes: int, grow: Callable[[int], None]) -> None:
        """`grow` charges the client with so many bytes more, or raises `TooManyRequests`."""
        self.max_bytes = max_bytes
        self._grow = grow
        self._pieces: list[bytes] = []
        # Of small ones, until they are enough for a piece: each object takes memory of its own.
        self._last = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        """Raises `ImageRefused` for an image over its bound, and `TooManyRequests`."""
        self._num_bytes += len(data)
        check_size(self._num_bytes, self.max_bytes)
        self._grow(len(data))
        if len(data) >= _SMALL_BYTES:
            self._close_piece()
            self._pieces.append(data)
            return
        self._last += data
        if len(self._last) >= PIECE_BYTES:
            self._close_piece()

    def pieces(self) -> Pieces:
        """All of it. Raises `ImageRefused` where nothing came."""
        self._close_piece()
        if not self._pieces:
            raise ImageRefused("the image is empty")
        return tuple(self._pieces)

    def _close_piece(self) -> None:
        if self._last:
            self._pieces.append(bytes(self._last))
            self._last = bytearray()


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raises `ImageRefused` for more bytes than an image may have."""
    if num_bytes > max_bytes:
        raise ImageRefused(f"the image has more than {max_bytes} bytes (--max-image-bytes)")


def base64_start(url: str) -> int:
    """Where the data of a data URL begins. Raises `ImageRefused`."""
    comma = url.find(",", 0, _MAX_HEAD_CHARS)
    if not url[: max(comma, 0)].lower().endswith(";base64"):
        raise ImageRefused("a data URL is data:image/TYPE;base64,DATA")
    return comma + 1


async def add_base64(incoming: Incoming, text: str, start: int, turn: asyncio.Lock) -> None:
    """Add what the characters from `start` on stand for: of all images that share `turn`, one piece
    in each turn of the event loop.

    Raises `ImageRefused` also for anything but base64 with its padding and without line breaks.
    """
    check_size((len(text) - start) // 4 * 3 - 2, incoming.max_bytes)
    for begin in range(start, len(text), _PIECE_CHARS):
        end = begin + _PIECE_CHARS
        async with turn:
            incoming.add(_decode_base64(text[begin:end], is_last=end >= len(text)))
            await asyncio.sleep(0)


def _decode_base64(piece: str, *, is_last: bool) -> bytes:
    """Raises `ImageRefused`."""
    padding = piece[-2:].count("=") if is_last else 0
    try:
        data = binascii.a2b_base64(piece, strict_mode=True)
    except ValueError:
        data = b""
    # Characters that stand for nothing are not told from others in every case.
    if not data or len(data) * 4 != (len(piece) * 3 - 4 * padding):
        raise ImageRefused(
            "the image's data is not valid base64: A-Z, a-z, 0-9, + and /, padded with =, no more"
        )
    return data
