"""The memory and processor time that this process's control groups allow: a container's limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MOUNT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def memory_left() -> int | None:
    """The bytes that this process may still take. If no group has a limit, this is None with
    version 2 of control groups, and more than all memory with version 1.
    """
    lefts = (_memory_left_in(group) for group in _groups("memory"))
    return min((left for left in lefts if left is not None), default=None)


def cpu_quota() -> float | None:
    """The processor time that this process may use, in cores; None if no group has a limit."""
    quotas = (_cpu_quota_of(group) for group in _groups("cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control group and its ancestors. Each may have
    limits.

    A container may see its group under a path that is not mounted in it. Then its group is the
    mount itself, which comes last.
    """
    for line in _read(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one tree and names no controllers.
        mount = _MOUNT / controller if controllers else _MOUNT
        own = PurePosixPath(path.lstrip("/"))
        # A path with ".." names a group outside this cgroup namespace.
        below = PurePosixPath() if ".." in own.parts else own
        yield from (mount / group for group in (below, *below.parents))


def _memory_left_in(group: Path) -> int | None:
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    limit, used = _read(group / "memory.max"), _read(group / "memory.current")
    prefix = ""
    if not limit:
        limit = _read(group / "memory.limit_in_bytes")
        used = _read(group / "memory.usage_in_bytes")
        prefix = "total_"
    if not used or limit in ("", "max"):
        return None
    # The page cache is charged to the group, but reclaimed when the group needs memory.
    cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return max(0, int(limit) - max(0, int(used) - cached))


def _cpu_quota_of(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota = _read(group / "cpu.cfs_quota_us")
        period = _read(group / "cpu.cfs_period_us")
    if not period or quota in ("", "max", "-1"):
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        # Group names are arbitrary bytes.
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""
