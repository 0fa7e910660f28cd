"""Memory of the host: what this process may still take, and what work takes for a while.

Knows the machine and its control groups. Knows nothing of what the memory is for; imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock_shard.runner import cgroup

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")


def extra_host_bytes(work: Callable[[], object]) -> int:
    """Memory that `work` takes at its peak beyond what this process holds after it; 0 where the
    system does not tell (macOS, a /proc that may not be written to).
    """
    try:
        # Sets the peak back to what is held now. See proc(5).
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        work()
        return 0
    work()
    # Not getrusage: its peak is at least that of the process this one was started by.
    status = _sizes(_STATUS)
    return max(0, status["VmHWM"] - status["VmRSS"])


def free_host_bytes() -> int:
    """Memory this process may still take: the machine's, bounded by its control groups."""
    machine, groups = _meminfo_available(), cgroup.memory_left()
    return machine if groups is None else min(machine, groups)


def _meminfo_available() -> int:
    if _MEMINFO.exists():
        available = _sizes(_MEMINFO).get("MemAvailable")
        if available is not None:
            return available
    # No such file on macOS: assume half of what is built in.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _sizes(file: Path) -> dict[str, int]:
    """Of the lines `name: number kB` of a file of /proc, in bytes."""
    lines = os.fsdecode(file.read_bytes()).splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(number) * 1024 for name, number, _ in fields}
