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
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

# From Linux's <sys/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36
# A device's driver may take its time to end a process.
_PATIENCE_S = 30.0
_LOOK_S = 0.05
# For trackers of resources to remove what others left, on a busy machine too.
_TRACKERS_S = 15.0


class ProcessesRemain(OSError):
    """Processes were killed and do not end; the text names them."""


def adopt_orphans() -> None:
    """Become the parent of each descendant whose parent ends, to reap it: a container's first
    process may reap nobody. Does nothing on systems other than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_group(group: int) -> None:
    """Kill each process of a group that is left. Python's trackers of resources end by themselves
    then: they remove the shared memory that the others left.
    """
    _kill(_living(group), and_trackers=False)


async def end_group(group: int, patience_s: float = _PATIENCE_S) -> None:
    """Kill what is left of a group whose leader has ended and was reaped, until nothing is. Raises
    `ProcessesRemain` if something still is after so many seconds.
    """
    begun_s = time.monotonic()
    while left := await asyncio.to_thread(_reap_and_list, group):
        passed_s = time.monotonic() - begun_s
        if passed_s > patience_s:
            names = ", ".join(map(str, sorted(left)))
            raise ProcessesRemain(
                f"processes that were killed did not end in {patience_s:g} s: {names}"
            )
        _kill(left, and_trackers=passed_s > _TRACKERS_S)
        await asyncio.sleep(_LOOK_S)


def end_own_group() -> NoReturn:
    """End this process with all others of its group, at once."""
    others = [each for each in _living(os.getpgid(0)) if each != os.getpid()]
    _kill(others, and_trackers=False)
    os._exit(0)


def _kill(processes: Iterable[int], *, and_trackers: bool) -> None:
    for process in processes:
        if and_trackers or not _is_tracker(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _reap_and_list(group: int) -> list[int]:
    """Return the processes that have not ended, and reap those that have: in this order, as one
    that ends in between would be neither listed nor reaped.
    """
    left = _living(group)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    return left


def _living(group: int) -> list[int]:
    """List the processes of a group that have not ended; where that cannot be, the group itself."""
    if sys.platform == "linux":
        numbers = (int(name) for name in os.listdir("/proc") if name.isdecimal())
        return [process for process in numbers if _is_living_member(process, group)]
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return []
    return [-group]


def _is_living_member(process: int, group: int) -> bool:
    # The name before these may hold anything, brackets and spaces too.
    fields = _read(process, "stat").rpartition(b")")[2].split()
    return len(fields) > 2 and int(fields[2]) == group and fields[0] not in (b"Z", b"X")


def _is_tracker(process: int) -> bool:
    return b"multiprocessing.resource_tracker" in _read(process, "cmdline")


def _read(process: int, name: str) -> bytes:
    """Empty if it has ended."""
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:
        return b""
