"""The wait before the next try, which doubles after each failed one."""

from __future__ import annotations


class BackOff:
    """A wait of `wait_s` seconds: first `first_s`, then twice as long each time, up to `max_s`."""

    __slots__ = ("_first_s", "_max_s", "wait_s")

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = self.wait_s = first_s
        self._max_s = max_s

    def reset(self) -> None:
        self.wait_s = self._first_s

    def lengthen(self) -> None:
        self.wait_s = min(2 * self.wait_s, self._max_s)
