"""Processes that a child has started, at whatever remove: they end with it.

A child that leads a group hands it on to all that it starts. Whatever of the group is left when the
child has ended is killed and waited for: it may hold a device's memory, which the next needs.
Zombies do not count, as they hold nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

# From Linux's <sys/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36
# A device's driver may take its time to end a process.
_PATIENCE_S = 30.0
_LOOK_S = 0.05


class ProcessesRemain(OSError):
    """Processes were killed and do not end; the text names them."""


def adopt_orphans() -> None:
    """Become the parent of each descendant whose parent ends, to reap it: a container's first
    process may reap nobody. Does nothing on systems other than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_group(group: int) -> None:
    """Kill each process of a group that is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


async def end_group(group: int, patience_s: float = _PATIENCE_S) -> None:
    """Kill what is left of a group whose leader has ended and was reaped, until nothing is. Raises
    `ProcessesRemain` if something still is after so many seconds.
    """
    until_s = time.monotonic() + patience_s
    while left := await asyncio.to_thread(_left_of, group):
        if time.monotonic() > until_s:
            names = ", ".join(map(str, sorted(left)))
            raise ProcessesRemain(
                f"processes that were killed did not end in {patience_s:g} s: {names}"
            )
        kill_group(group)
        await asyncio.sleep(_LOOK_S)


def _left_of(group: int) -> list[int]:
    """The processes of a group that have not ended. Reaps those of ours that have."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    if sys.platform == "linux":
        return [pid for pid in map(int, _numbers()) if _is_living_member(pid, group)]
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return []
    return [group]


def _numbers() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdecimal()]


def _is_living_member(pid: int, group: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The name before it may hold anything, brackets and spaces too.
    state, _, group_of_it = status.rpartition(b")")[2].split()[:3]
    return int(group_of_it) == group and state not in (b"Z", b"X")
