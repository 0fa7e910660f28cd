"""Starts text processes when needed, lends each to one task at a time, and replaces them.

Clients share the processes by time. A client's tasks run in order of arrival, except that a long
body counts as arriving later. While a client's task takes long, other clients get one more process.

If a task's client disconnects, the process gets a moment to finish, because it can be used again;
then it is killed. If a process dies, only the request of its task fails.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from penstock_router.admission.turns import Place, Turns
from penstock_router.errors import Unavailable
from penstock_router.offload.body_kinds import Reading
from penstock_router.offload.text_messages import (
    ModelFacts,
    Outcome,
    Task,
    Work,
    decode_outcome,
    encode_task,
)
from penstock_router.task_process import TaskProcess

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)

_MODULE = "penstock_router.offload.text_process"
# Seconds per byte by which a body counts as arriving later than its client's other bodies: about
# twice the time of its text work.
SECONDS_A_BYTE = 5e-7
# Maximum of models in a process: a tokenizer takes many MB. For one more, the process is replaced.
MAX_MODELS = 8
# Seconds that a task may run on after its client left: less than starting a process takes.
_GRACE_S = 1.0
# Seconds for which the process that parsed a body is reserved for its text work.
_HOLD_S = 0.005
# Maximum of additional processes while tasks take long. Each has its models in memory.
_SPARE_PROCESSES = 4

# The data that follows a task. Each part is a list of pieces.
Parts = Sequence[Sequence[bytes]]
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})
# The time when a body counts as arrived, and its number.
Arrival = tuple[float, int]


class TextProcess:
    def __init__(self, log_level: str, log_format: str) -> None:
        """Start the process, in half a millisecond. Raises `Unavailable`."""
        self._models: set[ModelFacts] = set()
        try:
            self._child = TaskProcess(_MODULE, log_level, log_format)
        except OSError as error:
            logger.error("no text process can be started: %s", error)
            raise _lost() from None
        logger.info("text process %d started", self.pid)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    def has_room_for(self, task: Task) -> bool:
        if not isinstance(task, Work) or task.model in self._models:
            return True
        return len(self._models) < MAX_MODELS

    async def do(self, task: Task, parts: Parts, files: Mapping[str, bytes]) -> Outcome:
        """Have the process do a task; `files` are those of the task's model, if any.

        Raises `Unavailable` if the process died, `TimeoutError` if it took too long, and errors of
        the task.
        """
        if isinstance(task, Work) and task.model not in self._models:
            self._models.add(task.model)
            task = msgspec.structs.replace(task, file_names=tuple(files))
            parts = [*parts, *([data] for data in files.values())]
        sizes = [sum(map(len, pieces)) for pieces in parts]
        try:
            await self._child.send(encode_task(task, sizes), itertools.chain.from_iterable(parts))
            message = await self._child.receive_message()
        except (OSError, EOFError):
            status = await self.kill()
            logger.warning("text process %d ended with status %d", self.pid, status)
            raise TimeoutError if status == -signal.SIGALRM else _lost() from None
        except asyncio.CancelledError:
            await self.kill()
            raise
        return await decode_outcome(message)

    async def kill(self) -> int:
        """Kill the process; return its exit status, negative for a signal's number."""
        return await self._child.kill()


def _lost() -> Unavailable:
    return Unavailable("the process that worked on this request's text ended; try again")


@dataclass(eq=False, slots=True)
class _Lease:
    """A place, and the process that does its task, if already started."""

    place: Place
    process: TextProcess | None


class TextPool:
    """A few text processes and their queue of tasks, which `dispatch.py` bounds."""

    def __init__(self, num_processes: int, log_level: str, log_format: str = "auto") -> None:
        self._num_processes = num_processes
        self._logs = log_level, log_format
        self._turns = Turns(num_processes, _SPARE_PROCESSES)
        # The last one is taken first.
        self._free: list[TextProcess] = []
        # Leases reserved for the text work on a body, by the body's number.
        self._held: dict[int, _Lease] = {}
        # Tasks may outlive their callers, and the event loop has only weak references to them.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self,
        client: str,
        arrival: Arrival,
        task: Task,
        parts: Parts,
        files: Mapping[str, bytes] = _NO_FILES,
    ) -> Outcome:
        """Run `TextProcess.do` when it is the client's turn. Raises `Unavailable` also if the pool
        stops.
        """
        lease = self._held.pop(arrival[1], None) or await self._lease(client, arrival)
        turn = self._spawn(self._run(lease, arrival[1], task, parts, files))
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            # The client has disconnected.
            asyncio.get_running_loop().call_later(_GRACE_S, turn.cancel)
            raise
        finally:
            # Break the reference cycle of frame, task and error.
            del turn

    async def _run(
        self,
        lease: _Lease,
        number: int,
        task: Task,
        parts: Parts,
        files: Mapping[str, bytes],
    ) -> Outcome:
        is_held = False
        try:
            process = await self._usable(lease.process, task)
            lease.process = process
            outcome = await process.do(task, parts, files)
            if isinstance(outcome, Reading) and outcome.refusal is None:
                is_held = True
                self._hold(number, lease)
            return outcome
        finally:
            if not is_held:
                self._give_back(lease)

    async def _usable(self, process: TextProcess | None, task: Task) -> TextProcess:
        if process is not None and not (process.is_alive and process.has_room_for(task)):
            logger.info("text process %d is replaced", process.pid)
            await process.kill()
            process = None
        return process or TextProcess(*self._logs)

    def _spawn(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- who has a process ----

    async def _lease(self, client: str, arrival: Arrival) -> _Lease:
        place = await self._turns.take((client,), arrival)
        return _Lease(place, self._free.pop() if self._free else None)

    def _hold(self, number: int, lease: _Lease) -> None:
        """Reserve the process for the next task of this body, which follows immediately."""
        self._held[number] = lease
        asyncio.get_running_loop().call_later(_HOLD_S, self._end_hold, number, lease)

    def _end_hold(self, number: int, lease: _Lease) -> None:
        if self._held.get(number) is lease:
            del self._held[number]
            self._give_back(lease)

    def _give_back(self, lease: _Lease) -> None:
        if lease.process is not None and lease.process.is_alive:
            self._free.append(lease.process)
        self._turns.give_back(lease.place)
        if len(self._free) > self._num_processes:
            self._spawn(self._free.pop(0).kill())

    # ---- the end ----

    def stop(self) -> None:
        """Refuse new tasks and those that wait."""
        self._turns.stop(lambda: Unavailable("the router is shutting down"))

    async def close(self) -> None:
        self.stop()
        for number, lease in tuple(self._held.items()):
            self._end_hold(number, lease)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._free:
            await process.kill()
