"""Text processes: started when they are first needed, leased to one body at a time, replaced.

A body waits for a process behind those that came before it, and a long one also behind shorter ones
that come a little later. Waiting ends with whoever waits. A process that is at work for somebody
who has left may finish within a moment, so that the next body need not wait for a new one; after
that it is killed. One that dies costs the body it had. Knows messages, not what they mean.
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

from penstock_router.errors import Unavailable
from penstock_router.text_messages import HEADER, Report, Task, decode_report, framed

logger = logging.getLogger(__name__)

# A body counts as having come so much later: about twice as long as its text work takes.
SECONDS_A_BYTE = 5e-7
# No text takes so long: what does is a template that never ends, or a machine without memory.
MAX_TASK_S = 60.0
# What one whose client has left may still take: less than a new process would.
_GRACE_S = 1.0
# How long a process waits for the next task of the body that it was leased to.
_HOLD_S = 0.05
# A piece that is sent or received between two turns of the event loop.
_PIECE_BYTES = 256 * 1024

_Parts = Sequence[bytes | memoryview]
# A report, and what came after it.
Reply = tuple[Report, bytearray]


class ProcessLost(Exception):
    """A text process ended in the middle of a task, or could not be started."""


class TextProcess:
    """One process, and the socket to it. Only one task at a time."""

    def __init__(self, process: subprocess.Popen[bytes], router_end: socket.socket) -> None:
        self._process = process
        self._socket = router_end

    @classmethod
    def start(cls, log_level: str, log_format: str) -> TextProcess:
        """Start one, in half a millisecond. It ends when this process does, whatever ends it.

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
        """What it says to a task. Raises `ProcessLost`."""
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
        """End it, whatever it does; its status, negative for a signal's number."""
        self._process.kill()
        self._socket.close()
        return await asyncio.to_thread(self._process.wait)


def _started(log_level: str, log_format: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process, and our end of the socket to it. Raises `OSError`."""
    # It imports what this process does, and nothing from the folder that it happens to be in.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", "penstock_router.text_process"]
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
    """Where a process is, or would be."""

    def __init__(self) -> None:
        self.process: TextProcess | None = None


class TextPool:
    """A few text processes, and the bodies that wait for them, which `bodies.py` bounds."""

    def __init__(self, num_processes: int, log_level: str, log_format: str = "auto") -> None:
        self._log_level = log_level
        self._log_format = log_format
        self._slots = [_Slot() for _ in range(num_processes)]
        self._free = list(self._slots)
        # By urgency, lowest first; the number tells equals apart.
        self._waiting: list[tuple[float, int, asyncio.Future[_Slot | None]]] = []
        self._numbers = itertools.count()
        # What runs on after those who began it: kept here, as the loop holds tasks weakly.
        self._ending: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[Reply]] = set()
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        """Of the processes there are."""
        return [slot.process.pid for slot in self._slots if slot.process is not None]

    async def lease(self, num_bytes: int, arrived_s: float) -> Lease:
        """A process for a body that came at `arrived_s`, as the loop's clock has it.

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
                # It came at the very end.
                self.free(slot)
            raise

    def stop(self) -> None:
        """Refuse those who wait, and those who come."""
        self._stopping = True
        for _, _, turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
        self._waiting.clear()

    # ---- called by leases ----

    def free(self, slot: _Slot) -> None:
        """It is the next one's."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(slot)
                return
        self._free.append(slot)

    async def _process_at(self, slot: _Slot) -> TextProcess:
        """The process there, started if need be."""
        if slot.process is not None and slot.process.has_ended:
            # While nobody needed it.
            await self.end_process(slot)
        if slot.process is None:
            slot.process = TextProcess.start(self._log_level, self._log_format)
        return slot.process

    async def end_process(self, slot: _Slot) -> None:
        """End the one there; the next lease starts another."""
        process, slot.process = slot.process, None
        if process is not None:
            status = await process.kill()
            logger.warning("text process %d ended with status %d", process.pid, status)

    def ask(self, lease: Lease, task: Task, after: _Parts) -> asyncio.Task[Reply]:
        """Begin to ask the lease's process."""
        asking = asyncio.create_task(self._ask(lease, task, after))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return asking

    async def _ask(self, lease: Lease, task: Task, after: _Parts) -> Reply:
        if lease.process is None:
            lease.process = await self._process_at(lease.slot)
        return await lease.process.ask(task, after)

    def let_end(self, lease: Lease, asking: asyncio.Task[Reply]) -> None:
        """Nobody waits for what was asked: end the lease soon, and the process if it goes on."""
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
        """End all processes; no lease is in use any more, or will be of use."""
        self.stop()
        # Before their sockets are closed.
        tasks = [*self._asking, *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots:
            process, slot.process = slot.process, None
            if process is not None:
                await process.kill()


class Lease:
    """A process for one body, until it is given back."""

    def __init__(self, pool: TextPool, slot: _Slot) -> None:
        self._pool = pool
        self.slot = slot
        # From the first task on: no other one has what that one was sent.
        self.process: TextProcess | None = None
        self._ended = False
        self._hold: asyncio.TimerHandle | None = None

    async def ask(self, task: Task, after: _Parts) -> Reply:
        """What the process says to a task.

        The lease is over where this raises: `Unavailable` when the process died, `TimeoutError`
        when it took too long.
        """
        asking = self._pool.ask(self, task, after)
        try:
            async with asyncio.timeout(MAX_TASK_S):
                return await asyncio.shield(asking)
        except ProcessLost:
            try:
                await self._pool.end_process(self.slot)
            finally:
                self.give_back()
            raise Unavailable(
                "the process that worked on this request's text ended; try again"
            ) from None
        except BaseException:
            self._pool.let_end(self, asking)
            raise

    def hold(self) -> None:
        """Keep it for a moment: `take_up` says whether it is still there."""
        self._hold = asyncio.get_running_loop().call_later(_HOLD_S, self.give_back)

    def take_up(self) -> bool:
        """Go on with it after `hold`, where it was not given back meanwhile."""
        if self._hold is not None:
            self._hold.cancel()
        return not self._ended

    def give_back(self) -> None:
        """Done with it. Nothing happens the second time."""
        if not self._ended:
            self._ended = True
            self._pool.free(self.slot)
        if self._hold is not None:
            self._hold.cancel()
