"""Encodes long JSON in threads, in small pieces.

msgspec's C encoder holds the interpreter lock until it is done, which would block the event loop.
Between pieces the lock is released.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec

_encode = msgspec.json.encode

# Encoding a piece takes some tens of microseconds.
PIECE_BYTES = 64 * 1024
# The number of a list's items in one piece. Items are numbers, or objects that describe a token.
_PIECE_ITEMS = 256
# Sleep after this many bytes, so that the event loop gets the lock. After a sleep of 0 s this
# thread would often win it back.
_TURN_BYTES = 256 * 1024
_TURN_S = 1e-6


def encode(value: object) -> bytes:
    return join(json_pieces(value))


def join(pieces: Iterable[bytes]) -> bytes:
    """Join the pieces. Python's `join` releases the lock if they are long."""
    taken: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        taken.append(piece)
        num_bytes += len(piece)
        if num_bytes > _TURN_BYTES:
            time.sleep(_TURN_S)
            num_bytes = 0
    return b"".join(taken)


def json_pieces(value: object) -> Iterator[bytes]:
    """Yield a value's JSON in pieces. The value consists of `Raw` and of JSON's types, with strings
    as keys.
    """
    if isinstance(value, dict):
        yield from _frame(b"{", (_member(*member) for member in value.items()), b"}")
    elif isinstance(value, msgspec.Raw):
        yield from cut(memoryview(value))
    elif isinstance(value, str) and len(value) > PIECE_BYTES:
        starts = range(0, len(value), PIECE_BYTES)
        pieces = (_encode(value[start : start + PIECE_BYTES])[1:-1] for start in starts)
        yield from (b'"', *pieces, b'"')
    elif isinstance(value, list) and value and isinstance(value[0], dict | list | str):
        yield from _frame(b"[", map(json_pieces, value), b"]")
    elif isinstance(value, list):
        starts = range(0, len(value), _PIECE_ITEMS)
        runs = (_encode(value[start : start + _PIECE_ITEMS])[1:-1] for start in starts)
        yield from _frame(b"[", ((run,) for run in runs), b"]")
    else:
        yield _encode(value)


def cut(data: memoryview) -> Iterator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield bytes(data[start : start + PIECE_BYTES])


def _member(key: str, value: object) -> Iterator[bytes]:
    yield _encode(key) + b":"
    yield from json_pieces(value)


def _frame(opens: bytes, parts: Iterable[Iterable[bytes]], closes: bytes) -> Iterator[bytes]:
    yield opens
    for index, part in enumerate(parts):
        if index:
            yield b","
        yield from part
    yield closes
