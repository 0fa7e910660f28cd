"""Checks in the server whether constraints can be honoured, by asking a process of its own.

Knows nothing of requests. One check runs at a time; equal constraints share one, and verdicts are
cached by content. The process is started as soon as the tokenizer is known: reading a large one
takes seconds, and neither the first constraint nor one continued from another shard should wait
for that. A constraint that crashes costs a fork of that process only; if the process itself fails,
the next check starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from penstock_proto.child_environment import child_environment
from penstock_shard.constraints.check_link import (
    LENGTH,
    Start,
    Started,
    Verdict,
    encode_frame,
    patience_s,
)
from penstock_shard.request import Constraint, ConstraintLimits

logger = logging.getLogger(__name__)

# Most different constraints that wait for their check.
MAX_PENDING = 256
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


@dataclass(eq=False, slots=True)
class _Pending:
    """A constraint that waits for its verdict, and how many callers wait for it."""

    constraint: Constraint
    # None: the check failed.
    verdict: asyncio.Future[Verdict | None]
    num_waiting: int = 0
    is_running: bool = False


class ConstraintChecker:
    """Owns the check process and asks it. Runs on the server's event loop."""

    def __init__(self, limits: ConstraintLimits) -> None:
        self._limits = limits
        self._start: Start | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        # By content, in order of arrival.
        self._pending: OrderedDict[bytes, _Pending] = OrderedDict()
        self._worker: asyncio.Task[None] | None = None
        self._process: _CheckProcess | None = None

    def use(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Check constraints for this tokenizer from now on, and start a process for it."""
        start = Start(tokenizer_json, vocab_size, eos_token_ids, self._limits)
        if start != self._start:
            # A process for another tokenizer is replaced before the next check.
            self._start = start
            self._verdicts.clear()
            self._go_to_work()

    def known(self, constraint: Constraint) -> str | None:
        """The cached verdict (see `check`); None if there is none."""
        key = _key(constraint)
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    async def check(self, constraint: Constraint) -> str:
        """Why the constraint is refused; "" if it is not.

        Raises:
            NotChecked: too many constraints wait, or the machine is too busy.
            CheckFailed: there will be no verdict.
        """
        key = _key(constraint)
        pending = self._pending.get(key)
        if pending is None:
            if len(self._pending) >= MAX_PENDING:
                raise NotChecked(f"{MAX_PENDING} constraints wait to be checked, and no more may")
            pending = _Pending(constraint, asyncio.get_running_loop().create_future())
            self._pending[key] = pending
            self._go_to_work()
        pending.num_waiting += 1
        try:
            verdict = await asyncio.shield(pending.verdict)
        finally:
            pending.num_waiting -= 1
            if not pending.num_waiting and not pending.is_running:
                self._pending.pop(key, None)
        if verdict is None:
            raise CheckFailed("the shard failed to check a constraint")
        if not verdict.is_lasting:
            raise NotChecked(verdict.reason)
        return verdict.reason

    async def close(self) -> None:
        """End the process. Pending checks are cancelled."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        for pending in self._pending.values():
            pending.verdict.cancel()
        self._pending.clear()
        await self._end_process()

    def _go_to_work(self) -> None:
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        """Start a process if there is none, and make one check after another until none waits."""
        try:
            await self._prepare()
            while self._pending:
                key, pending = next(iter(self._pending.items()))
                pending.is_running = True
                start = self._start
                verdict = await self._verdict_on(pending.constraint)
                if verdict is not None and verdict.is_lasting and start is self._start:
                    self._keep(key, verdict.reason)
                del self._pending[key]
                pending.verdict.set_result(verdict)
        finally:
            self._worker = None

    async def _prepare(self) -> None:
        try:
            await self._running_process()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next check tries again
            await self._lose_process(error)

    async def _verdict_on(self, constraint: Constraint) -> Verdict | None:
        """The verdict; None if the check failed."""
        longest_s = patience_s(self._limits.timeout_s) + _GRACE_S
        try:
            process = await self._running_process()
            verdict = await process.verdict_on(constraint, longest_s)
        except (_ProcessLost, OSError) as error:
            await self._lose_process(error)
            return Verdict("constraints cannot be checked just now", is_lasting=False)
        except Exception as error:  # noqa: BLE001 - a defect costs the constraint it shows on
            # A late answer would be taken for the next constraint's verdict.
            await self._lose_process(error)
            return None
        if verdict.ending:
            logger.warning("a constraint (%s) ended its check: %s", constraint.kind, verdict.ending)
        return verdict

    async def _running_process(self) -> _CheckProcess:
        assert self._start is not None  # no engine, no request
        if self._process is not None and self._process.start is not self._start:
            await self._end_process()
        if self._process is None:
            self._process = await _CheckProcess.started(self._start)
        return self._process

    def _keep(self, key: bytes, reason: str) -> None:
        self._verdicts[key] = reason
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _lose_process(self, error: Exception) -> None:
        foreseen = isinstance(error, _ProcessLost | OSError)
        stack = None if foreseen else error
        logger.error("the process that checks constraints is lost: %s", error, exc_info=stack)
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()


class _CheckProcess:
    """The process, and our end of the socket."""

    def __init__(
        self,
        start: Start,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.start = start
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def started(cls, start: Start) -> _CheckProcess:
        """A process that is ready for constraints. Raises `_ProcessLost`."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await _new_process(theirs)
        except BaseException:
            ours.close()
            raise
        one = cls(start, process, *await asyncio.open_connection(sock=ours))
        try:
            problem = _decoded(_started_decoder, await one._ask(start, _START_S)).problem
            if problem:
                raise _ProcessLost(problem)
        except BaseException:
            await one.end()
            raise
        return one

    async def verdict_on(self, constraint: Constraint, longest_s: float) -> Verdict:
        """Raises `_ProcessLost`, also if the answer takes longer than `longest_s`."""
        return _decoded(_verdict_decoder, await self._ask(constraint, longest_s))

    async def end(self) -> None:
        """Kill the process, whatever it is doing."""
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _ask(self, message: Start | Constraint, longest_s: float) -> bytes:
        try:
            async with asyncio.timeout(longest_s):
                self._writer.write(encode_frame(message))
                header = await self._reader.readexactly(LENGTH.size)
                return await self._reader.readexactly(LENGTH.unpack(header)[0])
        except TimeoutError:
            raise _ProcessLost(f"no answer in {longest_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _ProcessLost("it ended without a word") from None


async def _new_process(its_end: socket.socket) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock_shard.constraints.check_process",
        str(its_end.fileno()),
        pass_fds=[its_end.fileno()],
        stdin=asyncio.subprocess.DEVNULL,
        # The library's crash messages may quote callers' constraints.
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        # As with the engine, a terminal's signals must reach the server only.
        start_new_session=True,
        env=child_environment(),
    )


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message:
    try:
        return decoder.decode(body)
    except ValueError as error:
        # From msgspec, or from text that is not UTF-8.
        raise _ProcessLost(f"what it says makes no sense: {error}") from None


def _key(constraint: Constraint) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()
