"""The clock that waits, deadlines and timeouts are measured by, in seconds from any start.

What measures time by it is handed one, `time.monotonic` unless told otherwise: simulated failures
take no time of this machine.
"""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
