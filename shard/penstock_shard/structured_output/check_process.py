"""The process that checks constraints: compiles each one, fills its first mask, and answers yes or
why not. Started by `checker` with one end of a socket pair; ends itself when the server is gone.

Each constraint is compiled in a fork of this process, so that one that uses up its memory, time or
stack affects no other; the server says how many at once. The time limit counts the fork's processor
time: the verdict must not depend on how busy the machine was. Never imports torch or grpc.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import msgspec

from penstock_shard.config import ConstraintLimits
from penstock_shard.ipc.framing import encode_frame, exactly, receive_frame
from penstock_shard.ipc.request import Constraint
from penstock_shard.structured_output.check_messages import (
    Check,
    Start,
    Started,
    Verdict,
    patience_s,
)
from penstock_shard.structured_output.compiler import Compiler, TokenizerUnusable
from penstock_shard.structured_output.refusal import ConstraintRefused

# Less than the engine's threads have: what fits in this does not overflow there.
_STACK_BYTES = 1 << 20
# Lower priority than the engine's steps.
_NICENESS = 5
# Short enough for a pipe to take in one write.
_REASON_CHARACTERS = 300
# A fork's answer begins with this, so that an empty reason differs from no answer at all.
_DONE = b"+"

_Message = TypeVar("_Message")

_start_decoder = msgspec.msgpack.Decoder(Start)
_check_decoder = msgspec.msgpack.Decoder(Check)


class ServerGone(Exception):
    """The server, which verdicts are for, has closed the connection."""


def main() -> None:
    """Check constraints until the server is gone. The argument is the socket's file descriptor."""
    # Service managers signal all processes at once; the server decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICENESS)
    with (
        socket.socket(fileno=int(sys.argv[1])) as connection,
        contextlib.suppress(ServerGone, ConnectionError),
    ):
        _serve(connection)


def _serve(connection: socket.socket) -> None:
    start = _receive(connection, _start_decoder)
    try:
        compiler = Compiler(
            start.tokenizer_json, start.vocab_size, start.eos_token_ids, start.limits
        )
    except TokenizerUnusable as error:
        connection.sendall(encode_frame(Started(str(error))))
        return
    # Keep the garbage collector from writing to objects, whose pages forks share until written to.
    gc.freeze()
    connection.sendall(encode_frame(Started("")))
    trials = _Trials(compiler, start.limits, connection)
    try:
        while True:
            trials.handle_next()
    finally:
        trials.kill()


@dataclass(frozen=True, slots=True)
class _Trial:
    """A constraint in its fork, and the end of the pipe that its answer comes from."""

    check: Check
    process_id: int
    reading: int
    # By the clock, after which it is given up.
    until_s: float


class _Trials:
    """The forks that run, and the connection that checks come from and verdicts go to."""

    def __init__(
        self, compiler: Compiler, limits: ConstraintLimits, connection: socket.socket
    ) -> None:
        self._compiler = compiler
        self._limits = limits
        self._connection = connection
        self._running: dict[int, _Trial] = {}

    def handle_next(self) -> None:
        """Wait until a check comes, or one ends or is overdue. Raises `ServerGone`."""
        connection = self._connection.fileno()
        readable, _, _ = select.select([connection, *self._running], [], [], self._left_s())
        for trial in list(self._running.values()):
            if trial.reading in readable or trial.until_s <= time.monotonic():
                self._end(trial, has_word=trial.reading in readable)
        if connection in readable:
            self._begin(_receive(self._connection, _check_decoder))

    def _left_s(self) -> float | None:
        """How long the oldest trial may still take; None without one."""
        if not self._running:
            return None
        return max(0.0, min(trial.until_s for trial in self._running.values()) - time.monotonic())

    def _begin(self, check: Check) -> None:
        reading, writing = os.pipe()
        process_id = os.fork()
        if not process_id:
            self._connection.close()
            for other in (reading, *self._running):
                os.close(other)
            limits = ConstraintLimits(check.timeout_s, self._limits.memory_bytes)
            _try_out(self._compiler, check.constraint, limits, writing)
        os.close(writing)
        until_s = time.monotonic() + patience_s(check.timeout_s)
        self._running[reading] = _Trial(check, process_id, reading, until_s)

    def _end(self, trial: _Trial, *, has_word: bool) -> None:
        """Send the verdict on a trial. The fork's word is empty if it died."""
        del self._running[trial.reading]
        word = os.read(trial.reading, select.PIPE_BUF) if has_word else b""
        os.close(trial.reading)
        if not has_word:
            os.kill(trial.process_id, signal.SIGKILL)
        _, status = os.waitpid(trial.process_id, 0)
        number = trial.check.number
        if word:
            verdict = Verdict(word[len(_DONE) :].decode(), number)
        elif has_word:
            verdict = self._verdict_on_the_dead(trial.check, status)
        else:
            reason = "constraints take too long to check just now"
            verdict = Verdict(reason, number, is_lasting=False, is_overdue=True)
        self._connection.sendall(encode_frame(verdict))

    def _verdict_on_the_dead(self, check: Check, status: int) -> Verdict:
        """The verdict on a constraint whose fork died: its end tells which limit was exceeded."""
        kind, number = check.constraint.kind, check.number
        ending = f"exit status {os.waitstatus_to_exitcode(status)}"
        if os.WIFSIGNALED(status):
            signum = os.WTERMSIG(status)
            if signum == signal.SIGPROF:
                bound = f"{check.timeout_s:g} s to compile (--constraint-timeout-s)"
                return Verdict(f"{kind}: needs more than {bound}", number, is_overdue=True)
            if signum in (signal.SIGABRT, signal.SIGKILL):
                # Without memory the library aborts, and the kernel kills.
                return Verdict(_too_large(kind, self._limits), number)
            ending = signal.strsignal(signum) or f"signal {signum}"
        return Verdict(f"{kind}: cannot be compiled", number, ending=ending)

    def kill(self) -> None:
        """End all forks."""
        for trial in self._running.values():
            os.kill(trial.process_id, signal.SIGKILL)
            os.waitpid(trial.process_id, 0)


def _too_large(kind: str, limits: ConstraintLimits) -> str:
    return f"{kind}: needs more than {limits.memory_bytes} bytes (--constraint-memory-bytes)"


# ---- in the fork ----


def _try_out(
    compiler: Compiler, constraint: Constraint, limits: ConstraintLimits, writing: int
) -> NoReturn:
    """Write why the constraint is refused, if it is, and end the process, whatever happens."""
    try:
        _limit_this_process(limits)
        reason = _refusal_of(compiler, constraint, limits)
        os.write(writing, _DONE + reason[:_REASON_CHARACTERS].encode(errors="replace"))
    finally:
        os._exit(1)


def _limit_this_process(limits: ConstraintLimits) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_STACK, _STACK_BYTES)
    in_use_bytes = _address_space_bytes()
    if in_use_bytes is not None:
        _lower(resource.RLIMIT_AS, in_use_bytes + limits.memory_bytes)
    # SIGPROF ends the process, even inside the library or after its parent died.
    signal.setitimer(signal.ITIMER_PROF, limits.timeout_s)


def _lower(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, hard))


def _address_space_bytes() -> int | None:
    """None if the system does not report it (macOS, which does not enforce a limit either)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return None


def _refusal_of(compiler: Compiler, constraint: Constraint, limits: ConstraintLimits) -> str:
    try:
        compiler.compile(constraint)
    except ConstraintRefused as error:
        return str(error)
    except MemoryError:
        return _too_large(constraint.kind, limits)
    return ""


def _receive(connection: socket.socket, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    """The next message. Raises `ServerGone`."""
    body = receive_frame(exactly(connection))
    if body is None:
        raise ServerGone
    return decoder.decode(body)


if __name__ == "__main__":
    main()
