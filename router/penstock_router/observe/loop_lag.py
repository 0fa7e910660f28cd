"""Measures the lag of the event loop's timers, which shows that the loop is blocked or overloaded.

The lag is measured after each sleep, so that a loop blocked for 1 s gives one value, not many.
uvloop's timers have a resolution of 1 ms, so a smaller lag does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

INTERVAL_S = 0.05
WINDOW_S = 10.0


class RecentMaximum:
    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        # (time, value), with falling values: a later value drops earlier ones that are not larger.
        self._kept: deque[tuple[float, float]] = deque()

    def add(self, value: float, now_s: float) -> float:
        """Add a value; return the largest of the window that ends now."""
        while self._kept and self._kept[-1][1] <= value:
            self._kept.pop()
        self._kept.append((now_s, value))
        while self._kept[0][0] < now_s - self._window_s:
            self._kept.popleft()
        return self._kept[0][1]


async def watch_loop(observe: Callable[[float, float], None]) -> None:
    """Every `INTERVAL_S`, call `observe` with the loop's lag and the largest lag of the last
    `WINDOW_S`, in seconds. Run until cancelled.
    """
    worst = RecentMaximum(WINDOW_S)
    while True:
        due_s = time.perf_counter() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        now_s = time.perf_counter()
        lag_s = max(0.0, now_s - due_s)
        observe(lag_s, worst.add(lag_s, now_s))
