"""Threads of low priority."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# With this nice value, other threads get about nine times as much of a processor.
_NICENESS = 10


def lower_priority() -> None:
    """Lower the calling thread's priority, if the system has thread priorities."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
