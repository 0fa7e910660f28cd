"""The default of --threads."""

from __future__ import annotations

import math
import os

from penstock_shard.device import cgroup


def default_threads() -> int:
    """The number of compute threads on cpu: one less than this process's cores. More threads would
    exhaust a control group's quota early in each period and then stall.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    if quota is not None:
        cores = min(cores, math.floor(quota))
    return max(1, cores - 1)
