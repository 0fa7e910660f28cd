"""The clock of waits, deadlines and timeouts, in seconds from any start.

Code gets the clock as an argument, by default `time.monotonic`, so that simulated failures take no
real time.
"""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
