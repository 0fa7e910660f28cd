"""The processes of a measurement: shard, router and load, their CPU time, and their end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.processes import Router, Service, Shard, free_port, running

from benchmarks.router_bench.stamping_shard import STAMPS_VARIABLE

_ROOT = Path(__file__).parents[2]
# Time limit for a load to become ready.
READY_TIMEOUT_S = 120.0
_WATCH_PERIOD_S = 0.1
_PROPORTIONAL = re.compile(r"^Pss: +(\d+) kB$", re.MULTILINE)


class StampingShard(Shard):
    """A shard with the fake runner; its tokens tell when they were sent."""

    def __init__(self, log_file: Path, place: tuple[int, int], *flags: str) -> None:
        """`place` has the shard's index, and the number of shards."""
        port = free_port()
        self.stamps_file = log_file.with_suffix(".stamps")
        self._place = place
        Service.__init__(
            self,
            "benchmarks.router_bench.stamping_shard",
            ["--port", str(port), "--runner", "fake", *flags],
            port,
            log_file,
            str(_ROOT),
        )

    def environment(self, log_file: Path) -> dict[str, str]:
        index, count = self._place
        return {STAMPS_VARIABLE: f"{self.stamps_file}:{index}:{count}"}


@dataclass(frozen=True, slots=True)
class Servers:
    """Shards and a router in front of them."""

    shards: Sequence[Shard]
    router: Router

    @property
    def port(self) -> int:
        return int(self.router.address.rpartition(":")[2])

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return processes by part: workers belong to the router, checkers of constraints to their
        shard.
        """
        engines = [shard.engine for shard in self.shards]
        shards = [each for shard in self.shards for each in _family(shard) if each not in engines]
        return {"router": _family(self.router), "shard": shards, "engine": engines}

    @property
    def addresses(self) -> list[str]:
        """The shards' addresses."""
        return [shard.address for shard in self.shards]

    @property
    def stamps_files(self) -> list[Path]:
        """The files of stamping shards."""
        return [each.stamps_file for each in self.shards if isinstance(each, StampingShard)]


def _family(service: Service) -> list[psutil.Process]:
    first = psutil.Process(service.process.pid)
    return [first, *first.children(recursive=True)]


@contextlib.contextmanager
def serving(
    folder: Path,
    shard_flags: Sequence[str],
    router_flags: Sequence[str],
    *,
    shards: int = 1,
    models: Sequence[str] = (),
    pin: bool = False,
    router: str = "penstock_router",
    model: Path | None = None,
) -> Iterator[Servers]:
    """Start shards and a router, wait until all serve, and end all at the end.

    There are `shards` shards, or one for each name in `models`. They have the fake runner and stamp
    their tokens, or serve `model`. The module `router` runs as router. Each shard's step is 1 %
    longer than the previous shard's, because shards of a real fleet do not run in lockstep.

    `pin` gives the router the first core, and all other processes the other cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if pin and len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])
    # Each of several stacks, one after another, has its own logs.
    number = len(list(folder.glob("router*.log")))
    try:
        with contextlib.ExitStack() as scope:
            started: list[Shard] = []
            shards = len(models) or shards
            for index in range(shards):
                log_file = folder / f"shard{number}-{index}.log"
                named = ["--served-model-name", models[index]] if models else []
                if model is None:
                    flags = _with_longer_step(shard_flags, 1 + index / 100) + named
                    started.append(StampingShard(log_file, (index, shards), *flags))
                else:
                    started.append(Shard(log_file, "--model", str(model), *shard_flags, *named))
                scope.enter_context(running(started[-1]))
            if pin:
                os.sched_setaffinity(0, cores[:1])
            router_flags = ("--log-level", "warning", *router_flags)
            addresses = [shard.address for shard in started]
            log_file = folder / f"router{number}.log"
            started_router = Router(
                log_file, addresses, *router_flags, module=router, python_path=str(_ROOT)
            )
            if pin and len(cores) > 1:
                os.sched_setaffinity(0, cores[1:])
            with running(started_router):
                yield Servers(started, started_router)
    finally:
        os.sched_setaffinity(0, cores)


def _with_longer_step(flags: Sequence[str], factor: float) -> list[str]:
    changed = list(flags)
    if "--step-ms" in changed:
        at = changed.index("--step-ms") + 1
        changed[at] = f"{float(changed[at]) * factor:g}"
    return changed


class Load:
    """A function in its own process, which gets a pipe as first argument.

    It sends "ready" when its work has begun, and after a stop its result. The end of the context
    kills it.
    """

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        arguments = (target, theirs, *args)
        self._process = context.Process(target=_run_and_stay, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Raises RuntimeError if the load ends, or is not ready in time."""
        said = self._receive(timeout_s)
        if said != "ready":
            raise RuntimeError(f"the load said {said!r} before it was ready")

    def stop(self, *what: Any) -> None:
        """Stop the load; `what` has arguments for it."""
        self._ours.send(what)

    def result(self, timeout_s: float) -> Any:
        """Return the load's result. Raises RuntimeError if it is late."""
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Any:
        if not self._ours.poll(timeout_s):
            raise RuntimeError(f"no word from the load within {timeout_s:g} s")
        try:
            return self._ours.recv()
        except EOFError:
            raise RuntimeError("the load ended without a word") from None


# A load's end of the pipe.
Pipe = Connection


def _run_and_stay(target: Callable[..., None], pipe: Pipe, *args: Any) -> None:
    """Run `target`, then wait until the other end is closed, because it reads this process's CPU
    time.
    """
    target(pipe, *args)
    with contextlib.suppress(EOFError):
        pipe.recv()


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds in a window, of each part and of all other processes."""

    from_s: float
    to_s: float
    cpu_s: dict[str, float]
    others_s: float

    @property
    def wall_s(self) -> float:
        return self.to_s - self.from_s

    def cores(self) -> dict[str, float]:
        """Return the cores that each part used, for a row."""
        found = {f"{name}_cores": used_s / self.wall_s for name, used_s in self.cpu_s.items()}
        return {**found, "others_cores": self.others_s / self.wall_s}


class Meter:
    """Measures `Usage` of servers and `others` from its creation to `read`."""

    def __init__(self, servers: Servers, **others: psutil.Process) -> None:
        self._servers = servers
        self._others = {**others, "parent": psutil.Process()}
        self._before = self._look()

    def read(self) -> Usage:
        before, after = self._before, self._look()
        cpu_s = {name: after[1][name] - used_s for name, used_s in before[1].items()}
        others_s = max(0.0, after[2] - before[2] - sum(cpu_s.values()))
        del cpu_s["parent"]
        return Usage(before[0], after[0], cpu_s, others_s)

    def _look(self) -> tuple[float, dict[str, float], float]:
        # A router may have started or ended processes.
        processes = self._servers.processes()
        processes.update((name, [process]) for name, process in self._others.items())
        used_s = {name: sum(map(_cpu_s, each)) for name, each in processes.items()}
        times = psutil.cpu_times()
        busy_s = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        return time.monotonic(), used_s, busy_s


def _cpu_s(process: psutil.Process) -> float:
    """Return CPU seconds of a process and its ended children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(sum(process.cpu_times()[:4]))
    return 0.0


def memory_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the memory of processes. On Linux, each has its part of shared pages."""
    total = 0
    for process in processes:
        # Processes for texts and constraints may end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            total += _proportional_bytes(process)
    return total


def _proportional_bytes(process: psutil.Process) -> int:
    """Return the proportional set size if it is known, else the resident size."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except (FileNotFoundError, PermissionError):
        return int(process.memory_info().rss)
    found = _PROPORTIONAL.search(text)
    return int(found[1]) * 1024 if found else int(process.memory_info().rss)


class MemoryWatch:
    """Memory of each part: at the beginning, and the largest since."""

    def __init__(self, look: Callable[[], dict[str, int]]) -> None:
        """`look` returns the bytes of each part."""
        self._look = look
        self.before_bytes = look()
        self.most_bytes = dict(self.before_bytes)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def grown_mb(self, part: str) -> float:
        """Return the largest growth of a part."""
        return (self.most_bytes[part] - self.before_bytes[part]) / 2**20

    def _watch(self) -> None:
        while not self._over.wait(_WATCH_PERIOD_S):
            now_bytes = self._look()
            self.most_bytes = {
                part: max(self.most_bytes[part], now_bytes[part]) for part in now_bytes
            }
