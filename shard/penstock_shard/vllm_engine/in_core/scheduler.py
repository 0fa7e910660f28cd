"""The schedulers, which vLLM's core imports by name."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from penstock_shard.vllm_engine.in_core.continuing import Continuing


class StepwiseScheduler(Continuing, Scheduler):  # type: ignore[misc]
    """Plans each step after the previous one has ended."""


class OverlappingScheduler(Continuing, AsyncScheduler):  # type: ignore[misc]
    """Plans each step while the previous one runs."""
