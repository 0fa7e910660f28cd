"""How many threads compute on a cpu unless --threads says it."""

from __future__ import annotations

import math
import os

from penstock_shard.device import cgroup


def default_threads() -> int:
    """Compute threads on cpu: all cores this process may use but one. A control group's quota is
    taken as a number of cores: more threads would exhaust it early in each period, and all stall.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    if quota is not None:
        cores = min(cores, math.floor(quota))
    return max(1, cores - 1)
