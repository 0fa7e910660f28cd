"""Text processes: started when they are first needed, lent to one task at a time, replaced.

Clients share the processes by time. Of one client's, tasks are done in order of arrival, except
that those of a long body also wait for those of shorter ones that arrive a little later. While
one's task takes long, others get a process more. Cancelling `run` ends the wait. A process whose
client has left gets a moment to finish its task, so that the next one need not wait for a new
process; then it is killed. When a process dies, only the request whose task it had fails.
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
from penstock_router.child_process.parent_end import ChildProcess
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

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)

_MODULE = "penstock_router.offload.text_process"
# Among its client's, a body's arrival counts as this much later for each byte: about twice as long
# as its text work takes.
SECONDS_A_BYTE = 5e-7
# How many models a process keeps, as a tokenizer takes many MB: for one more it is replaced.
MAX_MODELS = 8
# How long a task whose client has left may still run: less than starting a new process takes.
_GRACE_S = 1.0
# How long the process that read a body is kept for it: longer than it takes to ask for the work on
# its text.
_HOLD_S = 0.005
# How many processes more there may be while as many tasks take long: each has its models in memory.
_SPARE_PROCESSES = 4

# What comes after a task: each part in pieces.
Parts = Sequence[Sequence[bytes]]
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})
# When a body counts as arrived, and its number.
Arrival = tuple[float, int]


class TextProcess:
    """A process. It takes one task at a time."""

    def __init__(self, log_level: str, log_format: str) -> None:
        """Start it, in half a millisecond. Raises `Unavailable`."""
        self._models: set[ModelFacts] = set()
        try:
            self._child = ChildProcess(_MODULE, log_level, log_format)
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
        """Tell whether it has the task's model, or may get it."""
        if not isinstance(task, Work) or task.model in self._models:
            return True
        return len(self._models) < MAX_MODELS

    async def do(self, task: Task, parts: Parts, files: Mapping[str, bytes]) -> Outcome:
        """Have it do a task; `files` are those of its model, if it has one.

        Raises `Unavailable` when the process died, `TimeoutError` when it took too long, and what
        the task raised there.
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
        """Kill it; returns its exit status, negative for a signal's number."""
        return await self._child.kill()


def _lost() -> Unavailable:
    return Unavailable("the process that worked on this request's text ended; try again")


@dataclass(eq=False, slots=True)
class _Lease:
    """A place, and the process that does its task, once there is one."""

    place: Place
    process: TextProcess | None


class TextPool:
    """A few text processes, and the line of tasks that wait for them: `dispatch.py` bounds it."""

    def __init__(self, num_processes: int, log_level: str, log_format: str = "auto") -> None:
        self._num_processes = num_processes
        self._logs = log_level, log_format
        self._turns = Turns(num_processes, _SPARE_PROCESSES)
        # Those that live and have nothing to do. The last one is taken first.
        self._free: list[TextProcess] = []
        # By the number of the body that each has read, for the work on its text.
        self._held: dict[int, _Lease] = {}
        # They may outlive their callers: referenced here, as the event loop holds tasks weakly.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self,
        client: str,
        arrival: Arrival,
        task: Task,
        parts: Parts,
        files: Mapping[str, bytes] = _NO_FILES,
    ) -> Outcome:
        """`TextProcess.do`, once it is its turn. Raises `Unavailable` also when the pool stops."""
        lease = self._held.pop(arrival[1], None) or await self._lease(client, arrival)
        turn = self._spawn(self._run(lease, arrival[1], task, parts, files))
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            # Its client has left.
            asyncio.get_running_loop().call_later(_GRACE_S, turn.cancel)
            raise
        finally:
            # An error refers to this frame, and its task to the error.
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
        """The process, or another one in its place."""
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
        """Keep the process for the next task of this body, which comes at once."""
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
        """Refuse the tasks that wait, and any that come."""
        self._turns.stop(lambda: Unavailable("the router is shutting down"))

    async def close(self) -> None:
        """Kill all processes."""
        self.stop()
        for number, lease in tuple(self._held.items()):
            self._end_hold(number, lease)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._free:
            await process.kill()
