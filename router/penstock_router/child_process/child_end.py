"""The process's end: it does one task at a time for the router, and ends when that is gone."""

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

# Where processors are scarce, the router's event loop goes first: many wait for it.
NICENESS = 5
# The kernel's oom_score_adj, of 1000: when memory runs out, kill such a process first, which is
# soon replaced.
_OOM_SCORE = 500


@contextlib.contextmanager
def stream_to_router(
    fd: str, log_level: str, log_format: str, *, niceness: int = NICENESS
) -> Iterator[BufferedRWPair]:
    """Make this process one of the router's, whose socket is `fd`. Its scope ends quietly when the
    router closes the socket.
    """
    set_up_logging(log_format, log_level)
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or a supervisor sends them to all processes; this one ends with the router.
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
    """Exit when the router is gone, even in the middle of a task."""
    poll = select.poll()
    # No events: a hang-up is always reported.
    poll.register(fd, 0)
    poll.poll()
    os._exit(0)


def end_after(max_s: float) -> None:
    """Have the kernel end the process after that time, by SIGALRM; 0: not any more. Nothing else
    ends work that never releases the interpreter lock, such as a huge power in a template.
    """
    signal.setitimer(signal.ITIMER_REAL, max_s)


def read_exactly(stream: BufferedRWPair, num_bytes: int) -> bytes:
    """So many bytes. Raises `EOFError` when the router is gone."""
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data
