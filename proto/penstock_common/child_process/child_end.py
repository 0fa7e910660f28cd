"""The child's end: gives way to others, works for its parent, and ends when that is gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from io import BufferedRWPair
from pathlib import Path

from penstock_common.logs import set_up_logging

# If CPUs are scarce, the parent has priority: many requests wait for it.
NICENESS = 5
# If memory runs out, a process that does tasks ends first: it is quickly replaced.
_OOM_SCORE = 500


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM. A terminal or a service manager signals all processes at once, but
    the parent decides when this one ends.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def give_way(niceness: int, oom_score: int = 0) -> None:
    """Let other processes go first; if memory runs out, the kernel kills first what has the highest
    `oom_score_adj` (at most 1000).
    """
    with contextlib.suppress(OSError):
        os.nice(niceness)
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + oom_score)))


@contextlib.contextmanager
def stream_to_parent(
    fd: str, log_level: str, log_format: str, *, niceness: int = NICENESS
) -> Iterator[BufferedRWPair]:
    """Make this process a child that does tasks, with the socket `fd`. The scope ends when the
    parent closes the socket.
    """
    set_up_logging(log_format, log_level)
    leave_signals_to_parent()
    give_way(niceness, _OOM_SCORE)
    with socket.socket(fileno=int(fd)) as parent:
        end_with(parent, lambda: os._exit(0))
        with contextlib.suppress(EOFError, ConnectionError), parent.makefile("rwb") as stream:
            yield stream


def end_with(parent: socket.socket, end: Callable[[], object]) -> None:
    """Call `end` when the parent is gone, even during a task."""
    threading.Thread(target=_await_end, args=(parent.fileno(), end), daemon=True).start()


def _await_end(fd: int, end: Callable[[], object]) -> None:
    poll = select.poll()
    # No events: a hang-up is always reported.
    poll.register(fd, 0)
    poll.poll()
    end()


def end_after(max_s: float) -> None:
    """Have the kernel end the process after `max_s` seconds; 0 cancels. Only the kernel can end
    work that never releases the GIL, such as a huge power in a template.
    """
    signal.setitimer(signal.ITIMER_REAL, max_s)


def read_exactly(stream: BufferedRWPair, num_bytes: int) -> bytes:
    """Read `num_bytes` bytes. Raise `EOFError` when the parent is gone."""
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data
