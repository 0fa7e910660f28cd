"""Messages between a router and its process that decodes images.

The router sends the length of an image, and the image. The process returns a message, and after
`Decoded` the rows and their digest.
"""

from __future__ import annotations

import msgspec

# Seconds of CPU time. A JPEG file can have enough scans to take minutes.
MAX_DECODE_S = 10.0


class Decoded(msgspec.Struct, tag=True, frozen=True):
    """The size of a decoded image. Its rows follow, top to bottom, three bytes a pixel, and then
    the digest.
    """

    width: int
    height: int

    @property
    def num_bytes(self) -> int:
        return self.width * self.height * 3


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The reason why an image is not decoded, in our words, not Pillow's."""

    reason: str


Reply = Decoded | Refused
# Of an image that is sent.
LENGTHS = msgspec.msgpack.Decoder(int)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
