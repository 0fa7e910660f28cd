"""Delimits messages, and bounds the pieces in which they are sent."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

HEADER = struct.Struct("<Q")
# Bytes sent, received or copied between two turns of the event loop.
PIECE_BYTES = 256 * 1024


def framed(message: Any) -> bytes:
    data = msgspec.msgpack.encode(message)
    return HEADER.pack(len(data)) + data
