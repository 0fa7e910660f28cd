"""What names an image on the wire: a hash of its size and its pixels, however it was encoded."""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

DIGEST_BYTES = 32
# Changes with what is hashed.
_PREFIX = b"penstock image, RGB8\0"
_SIZE = struct.Struct("<II")


class Hash(Protocol):
    """What is used of hashlib's objects."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


def begin_digest(width: int, height: int) -> Hash:
    """The digest of an image of so many pixels, before any of them: `update` it with the rows from
    top to bottom, in pieces of any size, three bytes (red, green, blue) a pixel without padding.
    """
    return hashlib.sha256(_PREFIX + _SIZE.pack(width, height))


def image_digest(width: int, height: int, rows: bytes | memoryview) -> bytes:
    """The digest of an image, 32 bytes; `rows` has all of it."""
    digest = begin_digest(width, height)
    digest.update(rows)
    return digest.digest()
