"""The name of an image on the wire: a hash of size and pixels, the same for all encodings."""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

DIGEST_BYTES = 32
# Change this whenever the format of the hashed data changes.
_PREFIX = b"penstock image, RGB8\0"
_SIZE = struct.Struct("<II")


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


def begin_digest(width: int, height: int) -> Hash:
    """Begin an image's digest. `update` it with the rows from top to bottom, in pieces of any size:
    3 bytes per pixel (red, green, blue), without padding.
    """
    return hashlib.sha256(_PREFIX + _SIZE.pack(width, height))


def image_digest(width: int, height: int, rows: bytes | memoryview) -> bytes:
    """Return an image's digest, 32 bytes; `rows` has all its pixels."""
    digest = begin_digest(width, height)
    digest.update(rows)
    return digest.digest()
