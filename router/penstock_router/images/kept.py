"""A cache that holds the newest values, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class Kept(Generic[_Value]):
    """Values by 32 bytes of a hash, each with its size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, tuple[_Value, int]] = OrderedDict()

    def get(self, name: bytes) -> _Value | None:
        """Return the value and make it the newest."""
        if name not in self._entries:
            return None
        self._entries.move_to_end(name)
        return self._entries[name][0]

    def put(self, name: bytes, value: _Value, num_bytes: int) -> None:
        """Store a value, unless it alone is too large; drop the oldest values above the limit."""
        self.drop(name)
        if num_bytes > self._max_bytes:
            return
        self._entries[name] = value, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self.drop_oldest()

    def drop(self, name: bytes) -> None:
        _, num_bytes = self._entries.pop(name, (None, 0))
        self._num_bytes -= num_bytes

    def drop_oldest(self) -> bool:
        if not self._entries:
            return False
        self.drop(next(iter(self._entries)))
        return True

    def clear(self) -> None:
        while self.drop_oldest():
            pass
