"""Counts an image's bytes as they arrive, charges their client, and gathers them in pieces."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable

from penstock_router.images.image import ImageRefused, Pieces

# Bytes handled between two turns of the event loop, in a few tenths of a millisecond.
PIECE_BYTES = 128 * 1024
_SMALL_BYTES = PIECE_BYTES // 2
# Characters of base64: four characters are three bytes.
_PIECE_CHARS = PIECE_BYTES
# Maximum of characters before a data URL's comma; they are ignored.
_MAX_HEAD_CHARS = 200


class Incoming:
    """The part of an encoded image that has arrived."""

    def __init__(self, max_bytes: int, grow: Callable[[int], None]) -> None:
        """Begin an image; `grow` charges the client for more bytes, or raises `TooManyRequests`."""
        self.max_bytes = max_bytes
        self._grow = grow
        self._pieces: list[bytes] = []
        # Gathers small data into a piece, because each object has an overhead.
        self._last = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        """Add data. Raises `ImageRefused` for an image over its limit, and `TooManyRequests`."""
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
        """Return all pieces. Raises `ImageRefused` if the image is empty."""
        self._close_piece()
        if not self._pieces:
            raise ImageRefused("the image is empty")
        return tuple(self._pieces)

    def _close_piece(self) -> None:
        if self._last:
            self._pieces.append(bytes(self._last))
            self._last = bytearray()


def check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ImageRefused(f"the image has more than {max_bytes} bytes (--max-image-bytes)")


def base64_start(url: str) -> int:
    """Return the index at which the data of a data URL begins. Raises `ImageRefused`."""
    comma = url.find(",", 0, _MAX_HEAD_CHARS)
    if not url[: max(comma, 0)].lower().endswith(";base64"):
        raise ImageRefused("a data URL is data:image/TYPE;base64,DATA")
    return comma + 1


async def add_base64(incoming: Incoming, text: str, start: int, turn: asyncio.Lock) -> None:
    """Decode the base64 text from `start` on into `incoming`. All images with the same `turn`
    together decode one piece in each turn of the event loop.

    Raises `ImageRefused`, also for base64 without padding or with line breaks.
    """
    check_size((len(text) - start) // 4 * 3 - 2, incoming.max_bytes)
    for begin in range(start, len(text), _PIECE_CHARS):
        end = begin + _PIECE_CHARS
        async with turn:
            incoming.add(_decode_base64(text[begin:end], is_last=end >= len(text)))
            await asyncio.sleep(0)


def _decode_base64(piece: str, *, is_last: bool) -> bytes:
    padding = piece[-2:].count("=") if is_last else 0
    try:
        data = binascii.a2b_base64(piece, strict_mode=True)
    except ValueError:
        data = b""
    # `a2b_base64` does not detect every invalid character.
    if not data or len(data) * 4 != (len(piece) * 3 - 4 * padding):
        raise ImageRefused(
            "the image's data is not valid base64: A-Z, a-z, 0-9, + and /, padded with =, no more"
        )
    return data
