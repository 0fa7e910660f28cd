"""Text processes: started when they are first needed, lent to one task at a time, replaced.

Tasks get processes in order of arrival, except that those of a long body also wait for those of
shorter ones that arrive a little later. Cancelling `run` ends the wait. A process whose client has
left gets a moment to finish its task, so that the next one need not wait for a new process; then it
is killed. When a process dies, only the request whose task it had fails.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

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

logger = logging.getLogger(__name__)

_MODULE = "penstock_router.offload.text_process"
# In the line, a body's arrival counts as this much later for each byte: about twice as long as its
# text work takes.
SECONDS_A_BYTE = 5e-7
# How many models a process keeps, as a tokenizer takes many MB: for one more it is replaced.
MAX_MODELS = 8
# How long a task whose client has left may still run: less than starting a new process takes.
_GRACE_S = 1.0
# How long a body that was read stays in the line: longer than it takes to ask for the work on its
# text.
_HOLD_S = 0.005

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


class TextPool:
    """A few text processes, and the line of tasks that wait for them: `dispatch.py` bounds it."""

    def __init__(self, num_processes: int, log_level: str, log_format: str = "auto") -> None:
        self._logs = log_level, log_format
        # None: one that is not started yet. The last one is taken first.
        self._free: list[TextProcess | None] = [None] * num_processes
        # Of the bodies whose tasks wait, or are about to come; the first one first.
        self._line: list[Arrival] = []
        self._changed = asyncio.Event()
        # They may outlive their callers: referenced here, as the event loop holds tasks weakly.
        self._turns: set[asyncio.Task[Outcome]] = set()
        self._stopping = False

    async def run(
        self, arrival: Arrival, task: Task, parts: Parts, files: Mapping[str, bytes] = _NO_FILES
    ) -> Outcome:
        """`TextProcess.do`, once it is its turn. Raises `Unavailable` also when the pool stops."""
        process = await self._take(arrival)
        turn = asyncio.create_task(self._run(process, arrival, task, parts, files))
        self._turns.add(turn)
        turn.add_done_callback(self._turns.discard)
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            # Its client has left.
            asyncio.get_running_loop().call_later(_GRACE_S, turn.cancel)
            raise

    async def _run(
        self,
        process: TextProcess | None,
        arrival: Arrival,
        task: Task,
        parts: Parts,
        files: Mapping[str, bytes],
    ) -> Outcome:
        try:
            if process is not None and not (process.is_alive and process.has_room_for(task)):
                logger.info("text process %d is replaced", process.pid)
                await process.kill()
                process = None
            process = process or TextProcess(*self._logs)
            outcome = await process.do(task, parts, files)
            if isinstance(outcome, Reading) and outcome.refusal is None:
                self._hold(arrival)
            return outcome
        finally:
            is_alive = process is not None and process.is_alive
            self._free.insert(len(self._free) if is_alive else 0, process)
            self._wake()

    # ---- the line ----

    async def _take(self, arrival: Arrival) -> TextProcess | None:
        """A process, or the right to start one: the first in the line have those that are free."""
        bisect.insort(self._line, arrival)
        try:
            while not self._stopping:
                if self._line.index(arrival) < len(self._free):
                    return self._free.pop()
                await self._changed.wait()
            raise Unavailable("the router is shutting down")
        finally:
            self._leave(arrival)

    def _hold(self, arrival: Arrival) -> None:
        """Keep a process free for the next task of this body, which comes at once."""
        bisect.insort(self._line, arrival)
        asyncio.get_running_loop().call_later(_HOLD_S, self._leave, arrival)

    def _leave(self, arrival: Arrival) -> None:
        self._line.remove(arrival)
        self._wake()

    def _wake(self) -> None:
        """Have all who wait look whether it is their turn."""
        self._changed.set()
        self._changed.clear()

    # ---- the end ----

    def stop(self) -> None:
        """Refuse the tasks that wait, and any that come."""
        self._stopping = True
        self._wake()

    async def close(self) -> None:
        """Kill all processes."""
        self.stop()
        for turn in self._turns:
            turn.cancel()
        await asyncio.gather(*self._turns, return_exceptions=True)
        for process in self._free:
            if process is not None:
                await process.kill()
