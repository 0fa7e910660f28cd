"""What a router and its process that decodes images say to each other.

There: the encoded image, behind its length. Back: a message, and after `Decoded` the rows and then
their digest.
"""

from __future__ import annotations

import msgspec

# Of processors' time: a JPEG file can have scans enough for minutes.
MAX_DECODE_S = 10.0


class Decoded(msgspec.Struct, tag=True, frozen=True):
    """Rows of `width` pixels follow from top to bottom, three bytes a pixel, then the digest."""

    width: int
    height: int

    @property
    def num_bytes(self) -> int:
        return self.width * self.height * 3


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Why it is not decoded, in our words."""

    reason: str


Reply = Decoded | Refused
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
