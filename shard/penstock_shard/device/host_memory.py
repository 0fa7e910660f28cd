"""Host memory: the bytes that this process may still take, and the peak of a function."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock_shard.device import cgroup

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")


def extra_host_bytes(work: Callable[[], object]) -> int:
    """Run `work`; return its peak memory minus the bytes in use afterwards. Return 0 if the system
    does not report these sizes (macOS, a read-only /proc).
    """
    try:
        # Reset the peak (VmHWM) to the current size: proc(5).
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        work()
        return 0
    work()
    # Do not use getrusage: its peak includes the parent process before exec.
    status = _sizes(_STATUS)
    return max(0, status["VmHWM"] - status["VmRSS"])


def free_host_bytes() -> int:
    """The free bytes of the machine, within the limits of this process's control groups."""
    machine, groups = _meminfo_available(), cgroup.memory_left()
    return machine if groups is None else min(machine, groups)


def _meminfo_available() -> int:
    if _MEMINFO.exists():
        available = _sizes(_MEMINFO).get("MemAvailable")
        if available is not None:
            return available
    # macOS lacks the file. Assume half of the machine's memory.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _sizes(file: Path) -> dict[str, int]:
    """Read lines `name: number kB` of a file in /proc; return bytes by name."""
    lines = os.fsdecode(file.read_bytes()).splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(number) * 1024 for name, number, _ in fields}
