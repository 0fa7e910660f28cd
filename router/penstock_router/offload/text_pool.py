"""Text processes: started when they are first needed, leased to one body at a time, replaced.

Bodies get processes in order of arrival, except that a long body also waits for shorter ones that
arrive a little later. Cancelling `lease` ends the wait. A process whose client has left gets a
moment to finish its task, so that the next body need not wait for a new process; then it is killed.
When a process dies, only the request whose body it had fails.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from penstock_common.child_environment import child_environment
from penstock_router.errors import Unavailable
from penstock_router.offload.text_messages import HEADER, Report, Task, decode_report, framed

logger = logging.getLogger(__name__)

# In the queue, a body's arrival counts as this much later for each byte: about twice as long as its
# text work takes.
SECONDS_A_BYTE = 5e-7
# No text takes this long: a template that never ends does, or a machine that is out of memory.
MAX_TASK_S = 60.0
# How long a task whose client has left may still run: less than starting a new process takes.
_GRACE_S = 1.0
# How long a process waits for the next task of the body that it was leased to.
_HOLD_S = 0.05
# How much is sent or received between two turns of the event loop.
_PIECE_BYTES = 256 * 1024

_Parts = Sequence[bytes | memoryview]
# A report, and the bytes that came after it.
Reply = tuple[Report, bytearray]


class ProcessLost(Exception):
    """A text process ended in the middle of a task, or could not be started."""


class TextProcess:
    """One process, and the socket to it. It takes one task at a time."""

    def __init__(self, process: subprocess.Popen[bytes], router_end: socket.socket) -> None:
        self._process = process
        self._socket = router_end

    @classmethod
    def start(cls, log_level: str, log_format: str) -> TextProcess:
        """Start a process, in half a millisecond. It ends when this process ends, however it does.

        Raises `ProcessLost`.
        """
        try:
            process, ours = _started(log_level, log_format)
        except OSError as error:
            logger.error("no text process can be started: %s", error)
            raise ProcessLost from None
        ours.setblocking(False)
        logger.info("text process %d started", process.pid)
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def ask(self, task: Task, after: _Parts) -> Reply:
        """Send a task and `after`, and return the reply. Raises `ProcessLost`."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._socket, framed(task, sum(map(len, after))))
            for part in after:
                view = memoryview(part)
                for start in range(0, len(view), _PIECE_BYTES):
                    await loop.sock_sendall(self._socket, view[start : start + _PIECE_BYTES])
            message_bytes, after_bytes = HEADER.unpack(await self._receive(HEADER.size))
            report = decode_report(await self._receive(message_bytes))
            return report, await self._receive(after_bytes)
        except (OSError, EOFError):
            raise ProcessLost from None

    async def _receive(self, num_bytes: int) -> bytearray:
        loop = asyncio.get_running_loop()
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            received = await loop.sock_recv_into(self._socket, view[:_PIECE_BYTES])
            if not received:
                raise EOFError
            view = view[received:]
        return data

    async def kill(self) -> int:
        """Kill the process; returns its exit status, negative for a signal's number."""
        self._process.kill()
        self._socket.close()
        return await asyncio.to_thread(self._process.wait)


def _started(log_level: str, log_format: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process, and our end of the socket to it. Raises `OSError`."""
    # It imports from the same paths as this process, and nothing from its working directory.
    environment = {**child_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", "penstock_router.offload.text_process"]
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        try:
            process = subprocess.Popen(
                [*command, str(fd), log_level, log_format],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        except OSError:
            ours.close()
            raise
    return process, ours


class _Slot:
    """A place for one process, which may not be started yet."""

    def __init__(self) -> None:
        self.process: TextProcess | None = None


class TextPool:
    """A few text processes, and the bodies that wait for them, which `dispatch.py` bounds."""

    def __init__(self, num_processes: int, log_level: str, log_format: str = "auto") -> None:
        self._log_level = log_level
        self._log_format = log_format
        self._slots = [_Slot() for _ in range(num_processes)]
        self._free = list(self._slots)
        # A heap of (adjusted arrival, number, turn); the number orders equal arrivals.
        self._waiting: list[tuple[float, int, asyncio.Future[_Slot | None]]] = []
        self._numbers = itertools.count()
        # Tasks that outlive their caller: referenced here, as the event loop holds tasks weakly.
        self._ending: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[Reply]] = set()
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that were started and not yet ended."""
        return [slot.process.pid for slot in self._slots if slot.process is not None]

    async def lease(self, num_bytes: int, arrived_s: float) -> Lease:
        """A process for a body that arrived at `arrived_s`, by the event loop's clock.

        Raises `Unavailable` when the pool stops.
        """
        slot = None if self._stopping else await self._take_slot(arrived_s, num_bytes)
        if slot is None:
            raise Unavailable("the router is shutting down")
        return Lease(self, slot)

    async def _take_slot(self, arrived_s: float, num_bytes: int) -> _Slot | None:
        if self._free:
            return self._free.pop()
        turn: asyncio.Future[_Slot | None] = asyncio.get_running_loop().create_future()
        entry = (arrived_s + SECONDS_A_BYTE * num_bytes, next(self._numbers), turn)
        heapq.heappush(self._waiting, entry)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                if entry in self._waiting:
                    self._waiting.remove(entry)
                    heapq.heapify(self._waiting)
            elif (slot := turn.result()) is not None:
                # The slot was given at the same moment as the wait was cancelled.
                self.free(slot)
            raise

    def stop(self) -> None:
        """Refuse the bodies that wait, and any that arrive."""
        self._stopping = True
        for _, _, turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
        self._waiting.clear()

    # ---- called by leases ----

    def free(self, slot: _Slot) -> None:
        """Give the slot to the next body that waits."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(slot)
                return
        self._free.append(slot)

    async def _process_at(self, slot: _Slot) -> TextProcess:
        """The slot's process, started if there is none."""
        if slot.process is not None and slot.process.has_ended:
            # It ended while it was idle.
            await self.end_process(slot)
        if slot.process is None:
            slot.process = TextProcess.start(self._log_level, self._log_format)
        return slot.process

    async def end_process(self, slot: _Slot) -> None:
        """Kill the slot's process; the next lease starts another."""
        process, slot.process = slot.process, None
        if process is not None:
            status = await process.kill()
            logger.warning("text process %d ended with status %d", process.pid, status)

    def ask(self, lease: Lease, task: Task, after: _Parts) -> asyncio.Task[Reply]:
        """Start asking the lease's process; the pool keeps the asyncio task."""
        asking = asyncio.create_task(self._ask(lease, task, after))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return asking

    async def _ask(self, lease: Lease, task: Task, after: _Parts) -> Reply:
        if lease.process is None:
            lease.process = await self._process_at(lease.slot)
        return await lease.process.ask(task, after)

    def let_end(self, lease: Lease, asking: asyncio.Task[Reply]) -> None:
        """Nobody waits for the reply now: give the task a moment, then end lease and process."""
        task = asyncio.create_task(self._let_end(lease, asking))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _let_end(self, lease: Lease, asking: asyncio.Task[Reply]) -> None:
        try:
            await asyncio.wait((asking,), timeout=_GRACE_S)
            asking.cancel()
            await asyncio.wait((asking,))
            if asking.cancelled() or asking.exception() is not None:
                await self.end_process(lease.slot)
        finally:
            lease.give_back()

    async def close(self) -> None:
        """Kill all processes. No lease may be used any more."""
        self.stop()
        # Cancel the tasks before the sockets that they use are closed.
        tasks = [*self._asking, *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots:
            process, slot.process = slot.process, None
            if process is not None:
                await process.kill()


class Lease:
    """One body's use of a process, until it is given back."""

    def __init__(self, pool: TextPool, slot: _Slot) -> None:
        self._pool = pool
        self.slot = slot
        # Set by the first task: later tasks need this very process, which has the body.
        self.process: TextProcess | None = None
        self._ended = False
        self._hold: asyncio.TimerHandle | None = None

    @property
    def has_process(self) -> bool:
        """Whether its process runs already; one that does not is started by the first task."""
        return self.slot.process is not None

    async def ask(self, task: Task, after: _Parts, max_s: float | None = None) -> Reply:
        """The process's reply to a task, which may take so long; None: `MAX_TASK_S`.

        Raises `Unavailable` when the process died, `TimeoutError` when it took too long. Whatever
        this raises, the lease is over.
        """
        asking = self._pool.ask(self, task, after)
        try:
            async with asyncio.timeout(MAX_TASK_S if max_s is None else max_s):
                return await asyncio.shield(asking)
        except ProcessLost:
            try:
                await self._pool.end_process(self.slot)
            finally:
                self.give_back()
            raise Unavailable(
                "the process that worked on this request's text ended; try again"
            ) from None
        except BaseException:  # a caller that is gone leaves its process to its task
            self._pool.let_end(self, asking)
            raise

    def hold(self) -> None:
        """Keep the process for `_HOLD_S` more: `take_up` says whether it is still leased."""
        self._hold = asyncio.get_running_loop().call_later(_HOLD_S, self.give_back)

    def take_up(self) -> bool:
        """Continue after `hold`; False if the process was given back meanwhile."""
        if self._hold is not None:
            self._hold.cancel()
        return not self._ended

    def give_back(self) -> None:
        """Return the process to the pool. Idempotent."""
        if not self._ended:
            self._ended = True
            self._pool.free(self.slot)
        if self._hold is not None:
            self._hold.cancel()
