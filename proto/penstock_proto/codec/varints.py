"""Integers of variable length, as protobuf encodes them."""

from __future__ import annotations


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def read_varint(view: memoryview, place: int) -> tuple[int, int]:
    """An integer of protobuf's encoding, and the place after it."""
    number = shift = 0
    while True:
        byte = view[place]
        number |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return number, place
