"""How late the event loop comes to what is due: the one number that says whether something blocks
it, or whether it has more to do than it can. Knows neither HTTP nor Prometheus.

What is measured is seen at the end of a sleep, so that a loop blocked for a second is one value of
a second, not many. uvloop's timers count whole milliseconds: below one is rest, not lag.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

INTERVAL_S = 0.05
WINDOW_S = 10.0


class RecentWorst:
    """The largest of the values that came within a window of time."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        # When and what, falling: a value hides those before it that are no larger.
        self._kept: deque[tuple[float, float]] = deque()

    def add(self, value: float, now_s: float) -> float:
        """Take one more; the worst of the window that ends now."""
        while self._kept and self._kept[-1][1] <= value:
            self._kept.pop()
        self._kept.append((now_s, value))
        while self._kept[0][0] < now_s - self._window_s:
            self._kept.popleft()
        return self._kept[0][1]


async def watch_loop(observe: Callable[[float, float], None]) -> None:
    """Tell, `INTERVAL_S` after `INTERVAL_S`, how late the loop is in seconds and the worst of the
    last `WINDOW_S`; runs until cancelled.
    """
    worst = RecentWorst(WINDOW_S)
    while True:
        due_s = time.perf_counter() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        now_s = time.perf_counter()
        lag_s = max(0.0, now_s - due_s)
        observe(lag_s, worst.add(lag_s, now_s))
