"""Checks in the server whether constraints can be honoured, by asking a process of its own.

A few checks run at once; equal constraints share one, and verdicts are cached by content. Each
constraint gets a short time first: those that need more are checked again where they hold up only
each other. The process is started as soon as the tokenizer is known: reading a large one takes
seconds, and neither the first constraint nor one continued from another shard should wait for that.
A constraint that crashes costs a fork of that process only; if the process itself fails, the next
check starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Hashable
from typing import TypeVar

import msgspec

from penstock_shard.config import ConstraintLimits
from penstock_shard.ipc.child_process import ChildProcess, start_child
from penstock_shard.ipc.framing import encode_frame, read_frame
from penstock_shard.ipc.request import Constraint
from penstock_shard.structured_output.check_messages import (
    Check,
    Start,
    Started,
    Verdict,
    patience_s,
)
from penstock_shard.structured_output.check_queue import CheckQueue, Pending, QueueFull

logger = logging.getLogger(__name__)

_MODULE = "penstock_shard.structured_output.check_process"
# Checks at once, each in a fork of its own with its own bound on memory.
_MAX_AT_ONCE = 2
# Processor time that a constraint gets first; ordinary ones take a tenth of it.
_FIRST_S = 0.1
_MAX_VERDICTS = 8192
# Enough to read the largest tokenizers on a busy machine.
_START_S = 120.0
# Added to the time after which the process itself gives up on a constraint.
_GRACE_S = 5.0

_started_decoder = msgspec.msgpack.Decoder(Started)
_verdict_decoder = msgspec.msgpack.Decoder(Verdict)

_Message = TypeVar("_Message")


class NotChecked(Exception):
    """There is no verdict, for lack of time or room; the same constraint may be served later."""


class CheckFailed(Exception):
    """The check failed unexpectedly: a defect, which the log describes."""


class _ProcessLost(Exception):
    """The check process failed; the text says how."""


class ConstraintChecker:
    """Owns the check process and asks it. Runs on the server's event loop."""

    def __init__(self, limits: ConstraintLimits) -> None:
        self._limits = limits
        self._start: Start | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._queue = CheckQueue()
        # A task for each check that runs, and one that starts a process ahead of the first.
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_running = self._num_slow = 0
        self._is_closed = False
        self._process: _CheckProcess | None = None
        # Held while a process is started or ended.
        self._lock = asyncio.Lock()

    def use(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Check constraints for this tokenizer from now on, and start a process for it."""
        start = Start(tokenizer_json, vocab_size, eos_token_ids, self._limits)
        if start != self._start:
            # A process for another tokenizer is replaced once the checks that run have ended.
            self._start = start
            self._verdicts.clear()
            if not self._num_running:
                self._spawn(self._prepare())

    def known(self, constraint: Constraint) -> str | None:
        """The cached verdict (see `check`); None if there is none."""
        key = _key(constraint)
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    async def check(self, constraint: Constraint, caller: Hashable = None) -> str:
        """Why the constraint is refused; "" if it is not. Callers take turns.

        Raises:
            NotChecked: too many constraints wait, or the machine is too busy.
            CheckFailed: there will be no verdict.
        """
        if self._is_closed:
            raise NotChecked("the shard is shutting down")
        try:
            pending = self._queue.join(_key(constraint), constraint, caller)
        except QueueFull as error:
            raise NotChecked(str(error)) from None
        self._go_to_work()
        pending.num_waiting += 1
        try:
            verdict = await asyncio.shield(pending.verdict)
        finally:
            pending.num_waiting -= 1
            if not pending.num_waiting and not pending.is_running:
                self._queue.remove(pending)
        if verdict is None:
            raise CheckFailed("the shard failed to check a constraint")
        if not verdict.is_lasting:
            raise NotChecked(verdict.reason)
        return verdict.reason

    async def close(self) -> None:
        """End the process. Pending checks are cancelled."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for pending in list(self._queue):
            pending.verdict.cancel()
            self._queue.remove(pending)
        await self._end_process()

    # ---- checks ----

    def _go_to_work(self) -> None:
        """Begin as many checks as may run. One is always left to those that do not take long."""
        is_old = self._process is not None and self._process.start is not self._start
        while self._num_running < _MAX_AT_ONCE and not (is_old and self._num_running):
            pending = self._queue.take(slow=self._num_slow < _MAX_AT_ONCE - 1)
            if pending is None:
                return
            self._num_running += 1
            self._num_slow += pending.is_slow
            self._spawn(self._run(pending, is_slow=pending.is_slow))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, pending: Pending, *, is_slow: bool) -> None:
        """Make one check, then let the next begin."""
        start = self._start
        try:
            verdict = await self._verdict_on(pending, is_slow=is_slow)
        finally:
            self._num_running -= 1
            self._num_slow -= is_slow
        if verdict is not None and verdict.is_overdue and self._may_take_longer(is_slow=is_slow):
            self._queue.put_back(pending)
            if not pending.num_waiting:
                self._queue.remove(pending)
        else:
            if verdict is not None and verdict.is_lasting and start is self._start:
                self._keep(pending.key, verdict.reason)
            self._queue.remove(pending)
            pending.verdict.set_result(verdict)
        self._go_to_work()

    def _may_take_longer(self, *, is_slow: bool) -> bool:
        return not is_slow and self._limits.timeout_s > _FIRST_S

    async def _verdict_on(self, pending: Pending, *, is_slow: bool) -> Verdict | None:
        """The verdict; None if the check failed."""
        kind, timeout_s = pending.constraint.kind, self._limits.timeout_s
        process = None
        try:
            process = await self._running_process()
            verdict = await process.verdict_on(
                pending.constraint, timeout_s if is_slow else min(_FIRST_S, timeout_s)
            )
        except (_ProcessLost, OSError) as error:
            self._log(error)
            # Another check may have ended it already, and started the next.
            if process is not None and process is self._process:
                await self._end_process()
            return Verdict("constraints cannot be checked just now", is_lasting=False)
        except Exception as error:  # noqa: BLE001 - a defect costs the constraint it shows on
            self._log(error)
            return None
        if verdict.ending:
            logger.warning("a constraint (%s) ended its check: %s", kind, verdict.ending)
        return verdict

    # ---- the process ----

    async def _prepare(self) -> None:
        try:
            await self._running_process()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next check tries again
            self._log(error)

    async def _running_process(self) -> _CheckProcess:
        assert self._start is not None  # no engine, no request
        async with self._lock:
            if self._process is not None and not self._process.serves(self._start):
                await self._end_process()
            if self._process is None:
                self._process = await _CheckProcess.started(self._start)
            return self._process

    def _keep(self, key: bytes, reason: str) -> None:
        self._verdicts[key] = reason
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _log(self, error: Exception) -> None:
        foreseen = isinstance(error, _ProcessLost | OSError)
        what = "the process that checks constraints is lost" if foreseen else "a check failed"
        logger.error("%s: %s", what, error, exc_info=None if foreseen else error)

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()


class _CheckProcess:
    """The process, and our end of the socket."""

    def __init__(self, start: Start, process: ChildProcess) -> None:
        self.start = start
        self._process = process
        self._numbers = itertools.count()
        # Checks without a verdict, by number; and the task that reads verdicts.
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def started(cls, start: Start) -> _CheckProcess:
        """A process that is ready for constraints. Raises `_ProcessLost`."""
        # The library's crash messages may quote callers' constraints.
        process = await start_child(_MODULE, output=asyncio.subprocess.DEVNULL)
        one = cls(start, process)
        try:
            await one._become_ready()
        except BaseException:  # whatever it was, the process does not stay
            await one.end()
            raise
        return one

    async def _become_ready(self) -> None:
        self._process.writer.write(encode_frame(self.start))
        try:
            async with asyncio.timeout(_START_S):
                problem = _decoded(_started_decoder, await self._receive()).problem
        except TimeoutError:
            raise _ProcessLost(f"no answer in {_START_S:g} s") from None
        if problem:
            raise _ProcessLost(problem)
        self._reading = asyncio.create_task(self._read())

    def serves(self, start: Start) -> bool:
        """Whether it lives, and checks constraints for this vocabulary."""
        return start is self.start and self._reading is not None and not self._reading.done()

    async def verdict_on(self, constraint: Constraint, timeout_s: float) -> Verdict:
        """The verdict after at most so much processor time. Raises `_ProcessLost`, also where none
        comes.
        """
        if not self.serves(self.start):
            raise _ProcessLost("it has ended")
        number, verdict = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = verdict
        self._process.writer.write(encode_frame(Check(number, constraint, timeout_s)))
        longest_s = patience_s(timeout_s) + _GRACE_S
        try:
            async with asyncio.timeout(longest_s):
                answer: Verdict = await verdict
                return answer
        except TimeoutError:
            raise _ProcessLost(f"no answer in {longest_s:g} s") from None
        finally:
            del self._waiting[number]

    async def end(self) -> None:
        """Kill the process, whatever it is doing. Checks without a verdict have lost it."""
        if self._reading is not None:
            self._reading.cancel()
        self._fail(_ProcessLost("it was ended"))
        self._process.writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _read(self) -> None:
        """Hand each verdict to the check that waits for it, until the process ends."""
        try:
            while True:
                body = await self._receive()
                verdict = _decoded(_verdict_decoder, body)
                waiting = self._waiting.get(verdict.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(verdict)
        except _ProcessLost as error:
            self._fail(error)

    def _fail(self, error: _ProcessLost) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def _receive(self) -> bytes:
        body = await read_frame(self._process.reader)
        if body is None:
            raise _ProcessLost("it ended without a word")
        return body


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message:
    try:
        return decoder.decode(body)
    except ValueError as error:
        # From msgspec, or from text that is not UTF-8.
        raise _ProcessLost(f"what it says makes no sense: {error}") from None


def _key(constraint: Constraint) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()
