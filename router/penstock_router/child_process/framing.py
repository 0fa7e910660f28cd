"""How a message is told from the next one, and in how large pieces all is sent."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

# The length of a message.
HEADER = struct.Struct("<Q")
# How much is sent, received or copied between two turns of the event loop.
PIECE_BYTES = 256 * 1024


def framed(message: Any) -> bytes:
    """A message as MessagePack, behind its length."""
    data = msgspec.msgpack.encode(message)
    return HEADER.pack(len(data)) + data
