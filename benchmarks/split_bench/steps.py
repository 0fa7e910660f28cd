"""Times of an engine's steps and their parts. The engine's thread writes them; the benchmark reads
them.

Counts time by the clock, the thread's CPU time, and the time in which the thread was ready to run
but no core was free.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import struct
import time
from collections import abc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock_shard.config import ShardConfig
from penstock_shard.engine import run_engine as engine_process
from penstock_shard.engine.create_engine import create_engine
from penstock_shard.engine.engine import Engine
from penstock_shard.engine.loop import EngineLoop
from penstock_shard.ipc.messages import Inbox
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.model_loader.load_runner import LoadedRunner
from penstock_shard.worker.base import AdapterStore, Batch, ImageEncoder, RowResult, Runner

# The file for an engine's steps.
STEPS_VARIABLE = "PENSTOCK_BENCH_STEPS"

# The fields of `Moment`.
_RECORD = struct.Struct("<7dII")


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """The end of a step, at `at_s` of `time.monotonic`. Other times are sums over the thread's
    life, in seconds.
    """

    at_s: float
    # Of the thread, and in calls of the runner.
    cpu_s: float
    runner_cpu_s: float
    runner_s: float
    # Ready to run, but no core was free.
    core_wait_s: float
    runner_core_wait_s: float
    # Without a request.
    idle_s: float
    rows: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """A window: its steps, the mean time from the end of a step to the next, and its parts.

    `device_s` is the time of the device or model. `engine_s` is the engine's CPU time as far as the
    device waits for it. `wait_s` is the rest, in which the engine's thread could not run; at most
    `core_wait_s` of it was a wait for a core. `engine_cpu_s` is all of the engine's CPU time.
    """

    steps: int
    tokens: int
    rows: float
    period_s: float
    device_s: float
    engine_s: float
    wait_s: float
    core_wait_s: float
    engine_cpu_s: float
    # All CPU time of the thread, in cores.
    thread_cores: float


# ---- in the engine's process --------------------------------------------------------------------


class _Log:
    """Used only in the thread that steps."""

    def __init__(self, path: str) -> None:
        # Unbuffered, so that it can be read while the engine runs.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._scheduler = -1
        self._runner_s = self._runner_cpu_s = self._runner_core_wait_s = 0.0
        self._began = (0.0, 0.0, 0.0)
        self.idle_s = 0.0

    def begin_call(self) -> None:
        self._began = self._now()

    def end_call(self) -> tuple[float, float, float]:
        now, began = self._now(), self._began
        self._runner_s += now[0] - began[0]
        self._runner_cpu_s += now[1] - began[1]
        self._runner_core_wait_s += now[2] - began[2]
        return now

    def end_step(self, rows: int, tokens: int) -> None:
        at_s, cpu_s, core_wait_s = self.end_call()
        runner = (self._runner_cpu_s, self._runner_s, core_wait_s, self._runner_core_wait_s)
        os.write(self._file, _RECORD.pack(at_s, cpu_s, *runner, self.idle_s, rows, tokens))

    def _now(self) -> tuple[float, float, float]:
        if self._scheduler < 0:
            self._scheduler = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        waited_ns = int(os.pread(self._scheduler, 64, 0).split()[1])
        return time.monotonic(), time.thread_time(), 1e-9 * waited_ns


class _TimedRunner:
    """A `Runner` with timed calls; a step ends when it is collected."""

    def __init__(self, runner: Runner, log: _Log) -> None:
        self._runner = runner
        self._log = log

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    @property
    def adapters(self) -> AdapterStore | None:
        return self._runner.adapters

    @property
    def images(self) -> ImageEncoder | None:
        return self._runner.images

    def launch(self, batch: Batch) -> None:
        self._log.begin_call()
        self._runner.launch(batch)
        self._log.end_call()

    def collect(self) -> abc.Sequence[RowResult]:
        self._log.begin_call()
        results = self._runner.collect()
        tokens = sum(result.token_id is not None for result in results)
        self._log.end_step(len(results), tokens)
        return results

    def release(self, slot: int) -> None:
        self._runner.release(slot)

    def copy_states(self, copies: abc.Sequence[tuple[int, int]]) -> None:
        self._runner.copy_states(copies)

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        self._runner.read_block(group, block_id, into)

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        self._runner.write_block(group, block_id, data)


def measure_engine(path: str) -> Callable[..., Engine]:
    """Have the engine of this process write its steps to a file. Returns the `create_engine` that
    this process calls from now on.
    """
    log = _Log(path)
    take_inbox = engine_process._take_inbox

    def build(
        loaded: LoadedRunner,
        config: ShardConfig,
        tell_started: Callable[[list[str]], None],
        *others: Any,
    ) -> Engine:
        timed = dataclasses.replace(loaded, runner=_TimedRunner(loaded.runner, log))
        return create_engine(timed, config, tell_started, *others)

    def take(loop: EngineLoop, inbox: queue.SimpleQueue[Inbox], *, wait: bool) -> None:
        from_s = time.monotonic()
        take_inbox(loop, inbox, wait=wait)
        if wait:
            log.idle_s += time.monotonic() - from_s

    setattr(engine_process, "create_engine", build)  # noqa: B010 - a name that it only imports
    engine_process._take_inbox = take
    return build


# ---- in the benchmark's process -----------------------------------------------------------------


def read_moments(path: Path) -> Iterator[Moment]:
    """Yield the steps, in order."""
    data = path.read_bytes()
    whole = data[: len(data) // _RECORD.size * _RECORD.size]
    return (Moment(*fields) for fields in _RECORD.iter_unpack(whole))


def parts_of(
    moments: abc.Sequence[Moment], from_s: float, to_s: float, *, step_s: float | None, threads: int
) -> Parts:
    """Sum up the steps that began and ended in the window.

    `step_s` is the time of a step on a device beside the engine; the device waits only for engine
    time that does not fit into it. Without `step_s`, the engine's thread computes the model. With
    one compute thread, its CPU time shows how long it waited. With several, it also waits for the
    others, so only waits for a core are known.

    Raises RuntimeError if there are no steps.
    """
    steps = [
        _difference(before, after)
        for before, after in pairwise(moments)
        if from_s <= before.at_s and after.at_s < to_s
    ]
    if not steps:
        raise RuntimeError("the engine ran no step while it was measured")
    count = len(steps)
    busy_s = sum(step.at_s - step.idle_s for step in steps)
    cpu_s = sum(step.cpu_s for step in steps)
    runner_cpu_s = sum(step.runner_cpu_s for step in steps)
    if step_s is not None:
        device_s = count * step_s
        beyond_s = sum(max(0.0, step.cpu_s - step_s) for step in steps)
        engine_s = min(max(0.0, busy_s - device_s), beyond_s)
    else:
        waits_s = sum(step.runner_core_wait_s for step in steps)
        runner_s = sum(step.runner_s for step in steps)
        device_s = runner_cpu_s if threads == 1 else runner_s - waits_s
        engine_s = cpu_s - runner_cpu_s
    return Parts(
        steps=count,
        tokens=sum(step.tokens for step in steps),
        rows=sum(step.rows for step in steps) / count,
        period_s=busy_s / count,
        device_s=device_s / count,
        engine_s=engine_s / count,
        wait_s=max(0.0, busy_s - device_s - engine_s) / count,
        core_wait_s=sum(step.core_wait_s for step in steps) / count,
        engine_cpu_s=(cpu_s - runner_cpu_s) / count,
        thread_cores=cpu_s / sum(step.at_s for step in steps),
    )


def _difference(before: Moment, after: Moment) -> Moment:
    """Return the difference of two moments, which is a step; `at_s` is its duration."""
    return Moment(
        at_s=after.at_s - before.at_s,
        cpu_s=after.cpu_s - before.cpu_s,
        runner_cpu_s=after.runner_cpu_s - before.runner_cpu_s,
        runner_s=after.runner_s - before.runner_s,
        core_wait_s=after.core_wait_s - before.core_wait_s,
        runner_core_wait_s=after.runner_core_wait_s - before.runner_core_wait_s,
        idle_s=after.idle_s - before.idle_s,
        rows=after.rows,
        tokens=after.tokens,
    )
