"""The process that checks constraints: compiles each one, fills its first mask, and answers yes or
why not. Started by `checker` with one end of a socket pair; ends itself when the server is gone.

Each constraint is compiled in a fork of this process, so that one that uses up its memory, time or
stack does not affect the next. Its time limit counts the fork's processor time: the verdict must
not depend on how busy the machine was. Never imports torch or grpc.
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
from typing import NoReturn, TypeVar

import msgspec

from penstock_shard.constraints.check_link import (
    LENGTH,
    Start,
    Started,
    Verdict,
    encode_frame,
    patience_s,
)
from penstock_shard.constraints.compiler import Compiler, TokenizerUnusable
from penstock_shard.constraints.refusal import ConstraintRefused
from penstock_shard.request import Constraint, ConstraintLimits

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
_constraint_decoder = msgspec.msgpack.Decoder(Constraint)


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
    while True:
        constraint = _receive(connection, _constraint_decoder)
        verdict = _check(compiler, constraint, start.limits, connection)
        connection.sendall(encode_frame(verdict))


def _check(
    compiler: Compiler, constraint: Constraint, limits: ConstraintLimits, connection: socket.socket
) -> Verdict:
    reading, writing = os.pipe()
    process_id = os.fork()
    if not process_id:
        connection.close()
        os.close(reading)
        _try_out(compiler, constraint, limits, writing)
    os.close(writing)
    said = None
    try:
        said = _wait_for_word(reading, connection, patience_s(limits.timeout_s))
    finally:
        os.close(reading)
        if said is None:
            os.kill(process_id, signal.SIGKILL)
        _, status = os.waitpid(process_id, 0)
    if said is None:
        return Verdict("constraints take too long to check just now", is_lasting=False)
    if said:
        return Verdict(said[len(_DONE) :].decode())
    return _verdict_on_the_dead(constraint.kind, status, limits)


def _wait_for_word(reading: int, connection: socket.socket, longest_s: float) -> bytes | None:
    """The fork's answer: empty if it died, None if it took too long.

    Raises:
        ServerGone: its socket is readable. It sends nothing before the verdict, so it hung up.
    """
    hung_up = connection.fileno()
    readable, _, _ = select.select([reading, hung_up], [], [], longest_s)
    if hung_up in readable:
        raise ServerGone
    return os.read(reading, select.PIPE_BUF) if readable else None


def _verdict_on_the_dead(kind: str, status: int, limits: ConstraintLimits) -> Verdict:
    """The verdict on a constraint whose fork died: how it ended tells which limit was exceeded."""
    ending = f"exit status {os.waitstatus_to_exitcode(status)}"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGPROF:
            bound = f"{limits.timeout_s:g} s to compile (--constraint-timeout-s)"
            return Verdict(f"{kind}: needs more than {bound}")
        if number in (signal.SIGABRT, signal.SIGKILL):
            # Without memory the library aborts, and the kernel kills.
            return Verdict(_too_large(kind, limits))
        ending = signal.strsignal(number) or f"signal {number}"
    return Verdict(f"{kind}: cannot be compiled", ending=ending)


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


# ---- framing ----


def _receive(connection: socket.socket, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    """The next message. Raises `ServerGone`."""
    (count,) = LENGTH.unpack(_receive_exactly(connection, LENGTH.size))
    return decoder.decode(_receive_exactly(connection, count))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise ServerGone
        data += piece
    return bytes(data)


if __name__ == "__main__":
    main()
