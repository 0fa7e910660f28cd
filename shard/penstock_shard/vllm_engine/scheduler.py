"""The schedulers that vLLM's core imports by name; nothing else imports this."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from penstock_shard.vllm_engine.continuing import Continuing


class StepwiseScheduler(Continuing, Scheduler):  # type: ignore[misc]
    """Plans a step when the one before is over."""


class OverlappingScheduler(Continuing, AsyncScheduler):  # type: ignore[misc]
    """Plans a step while the one before is computed."""
