"""The ways to run a router and an engine: in one process, and as a pair of processes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.processes import Router, Service, Shard, free_port, running

from benchmarks.split_bench.one_process import TOKENS_ONLY_VARIABLE
from benchmarks.split_bench.steps import STEPS_VARIABLE

ONE, PAIR, TOKENS_ONLY = "one process", "pair", "tokens only"
WAYS = (ONE, PAIR, TOKENS_ONLY)

# PYTHONPATH with this benchmark's modules.
_PYTHON_PATH = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
)
_ROUTER_FLAGS = ("--log-level", "warning")


class _MeasuredShard(Shard):
    """A shard with an engine that records its steps."""

    engine_module = "benchmarks.split_bench.measured_shard"

    def __init__(self, log_file: Path, steps_file: Path, flags: Sequence[str]) -> None:
        self._steps_file = steps_file
        port = free_port()
        arguments = ["--port", str(port), *flags]
        Service.__init__(self, self.engine_module, arguments, port, log_file, _PYTHON_PATH)

    def environment(self, log_file: Path) -> dict[str, str]:
        return {STEPS_VARIABLE: str(self._steps_file)}


class _OneProcess(Router):
    """A router with the engine in it, or the engine alone: see `one_process`."""

    def __init__(
        self, log_file: Path, steps_file: Path, flags: Sequence[str], tokens_only: str = ""
    ) -> None:
        self._steps_file = steps_file
        self._tokens_only = tokens_only
        port = free_port()
        arguments = ["--port", str(port), *_ROUTER_FLAGS, "--", *flags]
        module = "benchmarks.split_bench.one_process"
        Service.__init__(self, module, arguments, port, log_file, _PYTHON_PATH)

    def environment(self, log_file: Path) -> dict[str, str]:
        return {
            **super().environment(log_file),
            STEPS_VARIABLE: str(self._steps_file),
            TOKENS_ONLY_VARIABLE: self._tokens_only,
            # As a shard's server sets it for its engine.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }

    def _listens(self) -> bool:
        return bool(self._tokens_only) or super()._listens()

    def healthy(self) -> bool:
        if not self._tokens_only:
            return super().healthy()
        return self._steps_file.exists() and self._steps_file.stat().st_size > 0


class Stack:
    """A running way: its port, its engine's file, and its processes by part."""

    def __init__(self, port: int, steps_file: Path, parts: Mapping[str, psutil.Process]) -> None:
        self.port = port
        self.steps_file = steps_file
        self.parts = parts


@contextlib.contextmanager
def serving(
    way: str, folder: Path, shard_flags: Sequence[str], *, streams: int, seed: int
) -> Iterator[Stack]:
    """Start a way, wait until it serves, and end it at the end.

    Without a router, `streams` of the load with this `seed` run by themselves.
    """
    number = len(list(folder.glob("*.log")))
    steps_file = folder / f"{number}.steps"
    log_file = folder / f"{number}.log"
    if way != PAIR:
        tokens_only = f"{streams},{seed}" if way == TOKENS_ONLY else ""
        one = _OneProcess(log_file, steps_file, shard_flags, tokens_only)
        with running(one):
            yield Stack(_port(one), steps_file, {"one": psutil.Process(one.process.pid)})
        return
    shard = _MeasuredShard(log_file, steps_file, shard_flags)
    with running(shard):
        router = Router(folder / f"{number}-router.log", [shard.address], *_ROUTER_FLAGS)
        with running(router):
            parts = {
                "router": psutil.Process(router.process.pid),
                "server": psutil.Process(shard.process.pid),
                "engine": shard.engine,
            }
            yield Stack(_port(router), steps_file, parts)


def _port(service: Service) -> int:
    return int(service.address.rpartition(":")[2])


class Meter:
    """CPU time of a stack's parts, of `others`, and of all other processes on the machine."""

    def __init__(self, stack: Stack, **others: psutil.Process) -> None:
        self._processes = {**stack.parts, **others, "parent": psutil.Process()}
        self._before = self._look()

    def read(self) -> tuple[float, float, dict[str, float]]:
        """Return begin and end, and the cores that each part used."""
        (from_s, before, busy_before_s), (to_s, after, busy_s) = self._before, self._look()
        cpu_s = {name: after[name] - used_s for name, used_s in before.items()}
        others_s = max(0.0, busy_s - busy_before_s - sum(cpu_s.values()))
        del cpu_s["parent"]
        found = {**cpu_s, "others": others_s}
        return from_s, to_s, {name: used_s / (to_s - from_s) for name, used_s in found.items()}

    def _look(self) -> tuple[float, dict[str, float], float]:
        used_s = {name: float(sum(p.cpu_times()[:2])) for name, p in self._processes.items()}
        times = psutil.cpu_times()
        busy_s = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        return time.monotonic(), used_s, busy_s
