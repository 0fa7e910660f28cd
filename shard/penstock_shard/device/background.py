"""Threads that give way to others of their process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# Of `nice`: others get some nine times as much of a processor.
_NICENESS = 10


def lower_priority() -> None:
    """Have the calling thread get less of a processor that others want too. Where threads have no
    priorities of their own, nothing changes.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
