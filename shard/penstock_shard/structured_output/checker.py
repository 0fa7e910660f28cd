"""Asks a separate process whether constraints can be honoured. Runs in the server.

Two checks run at once; callers take turns. Equal constraints share one check, which begins at the
first turn of any of their callers. Verdicts are cached by content. Slow constraints are checked
again, one at a time, so that they delay only each other. The process starts once the tokenizer is
known, because reading it may take seconds; after a loss, the next check starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import signal
from collections import Counter, OrderedDict
from collections.abc import Collection, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from penstock_common.child_process.framing import PIECE_BYTES, encode_frame, read_frame
from penstock_common.child_process.start import ChildProcess, Streams, start_child
from penstock_proto.types import Constraint
from penstock_shard.config import ConstraintLimits
from penstock_shard.structured_output.check_messages import Answer, Check, Start, patience_s
from penstock_shard.structured_output.turns import Turns

logger = logging.getLogger(__name__)

_MODULE = "penstock_shard.structured_output.check_process"
# The number of checks at once.
_NUM_LANES = 2
# Processor time of a first check; ordinary constraints need a tenth of it.
_FIRST_S = 0.1
# The most constraints without a verdict. A caller may have at most as many as places are free:
# half, if it is alone.
_MAX_PENDING = 512
_MAX_VERDICTS = 8192
# Enough to read the largest tokenizers on a busy machine.
_START_S = 120.0
# Seconds to wait for an answer after the fork should have ended itself.
_GRACE_S = 5.0

# Exit codes of forks that used up their processor time or wall-clock time.
_OVERDUE = (-signal.SIGPROF, -signal.SIGALRM)

_ANSWERS = msgspec.msgpack.Decoder(Answer)
_Result = TypeVar("_Result")


class NotChecked(Exception):
    """There was no time or room for a check; a later one may succeed."""


class CheckFailed(Exception):
    """A defect, which the log describes, ended the check."""


@dataclass(eq=False, slots=True)
class _Pending:
    """A constraint without a verdict, and the number of waiting requests of each caller."""

    key: bytes
    constraint: Constraint
    task: asyncio.Task[str] = field(init=False)
    callers: Counter[Hashable] = field(default_factory=Counter)
    is_running: bool = False


class ConstraintChecker:
    """Owns the check process. Runs on the server's event loop."""

    def __init__(self, limits: ConstraintLimits) -> None:
        self._limits = limits
        self._tokenizer_json = b""
        self._start: Start | None = None
        self._process: _CheckProcess | None = None
        self._lock = asyncio.Lock()
        self._lanes, self._slow = Turns(_NUM_LANES), Turns(1)
        self._pending: dict[bytes, _Pending] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    def use(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Start a process for this tokenizer, and use it from now on."""
        start = Start(len(tokenizer_json), vocab_size, eos_token_ids, self._limits)
        if (start, tokenizer_json) != (self._start, self._tokenizer_json):
            self._start, self._tokenizer_json = start, tokenizer_json
            self._verdicts, self._pending = OrderedDict(), {}
            self._spawn(self._prepare())

    def known(self, constraint: Constraint) -> str | None:
        """The cached verdict (see `check`), or None."""
        key = _key(constraint)
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    async def check(self, constraint: Constraint, caller: Hashable = None) -> str:
        """Return why the constraint is refused; "" if it is not. Callers take turns.

        Raises:
            NotChecked: too many constraints wait, or the machine is too busy.
            CheckFailed: a defect ended the check.
        """
        pending = self._join(_key(constraint), constraint, caller)
        pending.callers[caller] += 1
        try:
            return await asyncio.shield(pending.task)
        finally:
            pending.callers[caller] -= 1
            if not pending.callers[caller]:
                del pending.callers[caller]
            if not pending.callers and not pending.is_running:
                self._forget(pending)
                pending.task.cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_process()

    # ---- checks ----

    def _join(self, key: bytes, constraint: Constraint, caller: Hashable) -> _Pending:
        """The check of this constraint, new if none is pending. Raises `NotChecked`."""
        present = self._pending.get(key)
        if present is None or caller not in present.callers:
            self._refuse_more(caller, len(self._pending) - (present is not None))
        if present is not None:
            return present
        pending = self._pending[key] = _Pending(key, constraint)
        pending.task = self._spawn(self._run(pending))
        pending.task.add_done_callback(lambda _: self._forget(pending))
        return pending

    def _refuse_more(self, caller: Hashable, total: int) -> None:
        """Raise `NotChecked` if the caller may not add a constraint to the `total` pending ones."""
        own = sum(caller in pending.callers for pending in self._pending.values())
        if own >= _MAX_PENDING - total:
            raise NotChecked(
                f"{total} constraints wait to be checked, {own} of them of this caller; "
                f"at most {_MAX_PENDING}, and of one caller as many as are free; try again shortly"
            )

    def _forget(self, pending: _Pending) -> None:
        # The key may have a newer check already.
        if self._pending.get(pending.key) is pending:
            del self._pending[pending.key]
        if pending.task.done() and not pending.task.cancelled():
            # Retrieve the exception: the callers that waited for it may be gone.
            pending.task.exception()

    async def _run(self, pending: _Pending) -> str:
        # A new tokenizer may replace this dict before the check is over.
        verdicts = self._verdicts
        try:
            verdict = await self._verdict_on(pending)
        except NotChecked:
            raise
        except Exception as error:  # a defect fails only this constraint
            logger.error("a check failed: %s", error, exc_info=error)
            raise CheckFailed("the shard failed to check a constraint") from None
        verdicts[pending.key] = verdict
        if len(verdicts) > _MAX_VERDICTS:
            verdicts.popitem(last=False)
        return verdict

    async def _verdict_on(self, pending: _Pending) -> str:
        """Check, if needed again with more time. Raises `NotChecked` if the machine is too busy."""
        longest_s = self._limits.timeout_s
        first_s = min(_FIRST_S, longest_s)
        answer = await self._ask(pending, pending.callers, first_s)
        if answer.exit_code in _OVERDUE and first_s < longest_s:
            if not pending.callers:
                # Without callers this constraint would never get a turn.
                self._forget(pending)
                raise NotChecked("nobody waits for it any more")
            async with self._slow.place(pending.callers):
                # All slow constraints wait for a lane as one caller.
                answer = await self._ask(pending, (self._slow,), longest_s)
        return self._judge(pending.constraint.kind, answer)

    async def _ask(
        self, pending: _Pending, callers: Collection[Hashable], timeout_s: float
    ) -> Answer:
        """Raises `NotChecked` if the check process fails."""
        async with self._lanes.place(callers) as lane:
            pending.is_running = True
            try:
                process = await self._running_process()
                return await process.answer_to(Check(pending.constraint, timeout_s), lane)
            except OSError as error:
                _log_loss(error)
                raise NotChecked("constraints cannot be checked just now") from None
            finally:
                pending.is_running = False

    def _judge(self, kind: str, answer: Answer) -> str:
        """Turn an answer into a verdict. Raises `NotChecked` if the machine was too busy."""
        match -answer.exit_code:
            case 0:
                return answer.reason
            case signal.SIGALRM:
                raise NotChecked("constraints take too long to check just now")
            case signal.SIGPROF:
                bound = f"{self._limits.timeout_s:g} s to compile (--constraint-timeout-s)"
            case signal.SIGABRT | signal.SIGKILL:
                # If memory runs out, the library aborts (SIGABRT) or the kernel kills the fork
                # (SIGKILL).
                bound = f"{self._limits.memory_bytes} bytes (--constraint-memory-bytes)"
            case other:
                ending = signal.strsignal(other) if other > 0 else None
                logger.warning(
                    "a constraint (%s) ended its check: %s", kind, ending or f"exit status {-other}"
                )
                return f"{kind}: cannot be compiled"
        return f"{kind}: needs more than {bound}"

    # ---- the process ----

    def _spawn(self, work: Coroutine[None, None, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _prepare(self) -> None:
        try:
            await self._running_process()
        except OSError as error:
            _log_loss(error)

    async def _running_process(self) -> _CheckProcess:
        """The process for the present tokenizer; starts it if needed. Raises `OSError`."""
        assert self._start is not None  # requests come only after `use`
        async with self._lock:
            if self._process is None or not self._process.serves(self._start):
                await self._end_process()
                self._process = await _CheckProcess.started(self._start, self._tokenizer_json)
            return self._process

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()


@dataclass(eq=False, slots=True)
class _CheckProcess:
    start: Start
    child: ChildProcess
    lanes: list[Streams]

    @classmethod
    async def started(cls, start: Start, tokenizer_json: bytes) -> _CheckProcess:
        """Start a process, and wait until it is ready. Raises `OSError`."""
        # The library's crash messages may quote callers' constraints.
        output = asyncio.subprocess.DEVNULL
        child = await start_child(_MODULE, output=output, num_sockets=_NUM_LANES)
        one = cls(start, child, [(child.reader, child.writer), *child.more])
        answer = await one._answer(0, _START_S, encode_frame(start), tokenizer_json)
        if answer.reason:
            await one.end()
            raise ConnectionError(answer.reason)
        return one

    def serves(self, start: Start) -> bool:
        """True if the process lives and has this vocabulary."""
        is_lost = any(reader.at_eof() or writer.is_closing() for reader, writer in self.lanes)
        return start is self.start and not is_lost

    async def answer_to(self, check: Check, lane: int) -> Answer:
        """Raises `OSError` and ends the process if there is no answer."""
        return await self._answer(lane, patience_s(check.timeout_s) + _GRACE_S, encode_frame(check))

    async def _answer(self, lane: int, longest_s: float, *message: bytes) -> Answer:
        reader, writer = self.lanes[lane]
        answer: Answer | None = None
        try:
            async with asyncio.timeout(longest_s):
                await _send(writer, *message)
                body = await read_frame(reader)
            if body is None:
                raise ConnectionError("it ended without a word")
            answer = _ANSWERS.decode(body)
            return answer
        except TimeoutError:
            raise ConnectionError(f"no answer in {longest_s:g} s") from None
        finally:
            if answer is None:
                # Do this after a cancellation too: the next check on this lane must not get this
                # answer.
                await self.end()

    async def end(self) -> None:
        """Kill the process with its forks."""
        for _, writer in self.lanes:
            writer.transport.abort()
        self.child.kill()
        await self.child.wait()
        for _, writer in self.lanes:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, *message: bytes) -> None:
    """Send in pieces, because copying a large tokenizer at once would block the event loop."""
    for part in message:
        for start in range(0, len(part), PIECE_BYTES):
            writer.write(part[start : start + PIECE_BYTES])
            await writer.drain()


def _log_loss(error: OSError) -> None:
    logger.error("the process that checks constraints is lost: %s", error)


def _key(constraint: Constraint) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()
