"""The lag of the event loop's timers: the one number that shows that something blocks it, or
that it is overloaded.

The lag is measured at the end of a sleep, so that a loop blocked for a second gives one value of a
second, not many. uvloop's timers have a resolution of 1 ms: less than that is no lag.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

INTERVAL_S = 0.05
WINDOW_S = 10.0


class RecentMaximum:
    """The largest of the values of the last `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        # (time, value), values falling: earlier ones that are no larger are dropped.
        self._kept: deque[tuple[float, float]] = deque()

    def add(self, value: float, now_s: float) -> float:
        """Add a value; returns the largest of the window that ends now."""
        while self._kept and self._kept[-1][1] <= value:
            self._kept.pop()
        self._kept.append((now_s, value))
        while self._kept[0][0] < now_s - self._window_s:
            self._kept.popleft()
        return self._kept[0][1]


async def watch_loop(observe: Callable[[float, float], None]) -> None:
    """Call `observe` every `INTERVAL_S` with the loop's lag in seconds and the worst of the last
    `WINDOW_S`; runs until cancelled.
    """
    worst = RecentMaximum(WINDOW_S)
    while True:
        due_s = time.perf_counter() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        now_s = time.perf_counter()
        lag_s = max(0.0, now_s - due_s)
        observe(lag_s, worst.add(lag_s, now_s))
