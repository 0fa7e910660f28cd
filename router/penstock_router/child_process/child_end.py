"""The child's end: does one task at a time for the router, and exits when the router is gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from io import BufferedRWPair
from pathlib import Path

from penstock_common.logs import set_up_logging

# If CPUs are scarce, the router's event loop has priority: many requests wait for it.
NICENESS = 5
# The kernel's oom_score_adj (at most 1000). If memory runs out, the kernel kills this process
# first: it is quickly replaced.
_OOM_SCORE = 500


@contextlib.contextmanager
def stream_to_router(
    fd: str, log_level: str, log_format: str, *, niceness: int = NICENESS
) -> Iterator[BufferedRWPair]:
    """Make this process a child of the router, with the socket `fd`. The scope ends when the router
    closes the socket.
    """
    set_up_logging(log_format, log_level)
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or a supervisor signals all processes. This one ends with the router.
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(niceness)
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + _OOM_SCORE)))
    with socket.socket(fileno=int(fd)) as router:
        threading.Thread(target=_end_with, args=(router.fileno(),), daemon=True).start()
        with contextlib.suppress(EOFError, ConnectionError), router.makefile("rwb") as stream:
            yield stream


def _end_with(fd: int) -> None:
    """Exit when the router is gone, even during a task."""
    poll = select.poll()
    # No events: a hang-up is always reported.
    poll.register(fd, 0)
    poll.poll()
    os._exit(0)


def end_after(max_s: float) -> None:
    """Have the kernel end the process after `max_s` seconds; 0 cancels. Only the kernel can end
    work that never releases the GIL, such as a huge power in a template.
    """
    signal.setitimer(signal.ITIMER_REAL, max_s)


def read_exactly(stream: BufferedRWPair, num_bytes: int) -> bytes:
    """Read `num_bytes` bytes. Raise `EOFError` when the router is gone."""
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data
