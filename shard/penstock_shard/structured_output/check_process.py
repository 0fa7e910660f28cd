"""The process that checks constraints: it compiles each, fills its first mask, and answers.

    python -m penstock_shard.structured_output.check_process FD...

Each socket FD is a lane with its own process, which checks one constraint at a time, in a fork. A
constraint that exhausts its memory, time or stack ends only that fork. The limit is processor time,
so that the verdict does not depend on the machine's load. Lanes exit when the server is gone. Never
imports torch or grpc.
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

from penstock_common.child_process.child_end import NICENESS, give_way, leave_signals_to_parent
from penstock_common.child_process.framing import encode_frame, exactly, receive_frame
from penstock_common.malloc import return_free_memory
from penstock_proto.types import Constraint
from penstock_shard.structured_output.check_messages import Answer, Check, Start, patience_s
from penstock_shard.structured_output.compiler import Compiler, TokenizerUnusable
from penstock_shard.structured_output.refusal import ConstraintRefused

# Smaller than the stacks of the engine's threads: a constraint that fits here does not overflow
# those.
_STACK_BYTES = 1 << 20

_Message = TypeVar("_Message", Start, Check)
_STARTS = msgspec.msgpack.Decoder(Start)
_CHECKS = msgspec.msgpack.Decoder(Check)


class ServerGone(Exception):
    """The server has closed the connection."""


def main() -> None:
    """Check constraints until the server is gone. The arguments are the lanes' file descriptors."""
    leave_signals_to_parent()
    give_way(NICENESS)
    lanes = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    with contextlib.suppress(ServerGone, ConnectionError):
        start = _receive(lanes[0], _STARTS)
        compiler = _read_tokenizer(lanes[0], start)
        if compiler is not None:
            _serve(_own_lane(lanes), compiler, start.limits.memory_bytes)


def _read_tokenizer(lane: socket.socket, start: Start) -> Compiler | None:
    """Read the tokenizer. If it is unusable, tell the server and return None."""
    tokenizer_json = exactly(lane)(start.tokenizer_bytes)
    try:
        compiler = Compiler(tokenizer_json, start.vocab_size, start.eos_token_ids, start.limits)
    except TokenizerUnusable as error:
        lane.sendall(encode_frame(Answer(str(error))))
        return None
    lane.sendall(encode_frame(Answer()))
    # Free memory before the forks, which share what remains.
    return_free_memory()
    return compiler


def _own_lane(lanes: list[socket.socket]) -> socket.socket:
    """Fork a process for each lane except the first. Return this process's lane, and close the
    others.
    """
    # Forks share pages until someone writes to them, as the garbage collector would.
    gc.freeze()
    own = next((lane for lane in lanes[1:] if not os.fork()), lanes[0])
    for lane in lanes:
        if lane is not own:
            lane.close()
    return own


def _serve(lane: socket.socket, compiler: Compiler, memory_bytes: int) -> None:
    """Answer checks until `ServerGone` or `ConnectionError` is raised."""
    while True:
        check = _receive(lane, _CHECKS)
        reading, writing = os.pipe()
        process_id = os.fork()
        if not process_id:
            _try_out(compiler, check, memory_bytes, writing)
        os.close(writing)
        answer = os.read(reading, select.PIPE_BUF)
        os.close(reading)
        if answer:
            # Do not wait for the fork to exit: freeing its memory takes a while.
            lane.sendall(answer)
        _, status = os.waitpid(process_id, 0)
        if not answer:
            lane.sendall(encode_frame(Answer(exit_code=os.waitstatus_to_exitcode(status))))


def _receive(lane: socket.socket, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    """Raises `ServerGone` at the end of the connection."""
    body = receive_frame(exactly(lane))
    if body is None:
        raise ServerGone
    return decoder.decode(body)


# ---- in the fork ----


def _try_out(compiler: Compiler, check: Check, memory_bytes: int, writing: int) -> NoReturn:
    try:
        _limit_this_process(check.timeout_s, memory_bytes)
        # Short enough for one write to a pipe.
        os.write(writing, encode_frame(Answer(_refusal_of(compiler, check.constraint))))
    finally:
        os._exit(1)


def _limit_this_process(timeout_s: float, memory_bytes: int) -> None:
    # The timers' signals end this process even inside the library, or if the parent has died.
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    signal.setitimer(signal.ITIMER_REAL, patience_s(timeout_s))
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_STACK, _STACK_BYTES)
    in_use_bytes = _address_space_bytes()
    if in_use_bytes is not None:
        _lower(resource.RLIMIT_AS, in_use_bytes + memory_bytes)


def _lower(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, hard))


def _address_space_bytes() -> int | None:
    """Return None on macOS, which neither reports the size nor enforces a limit."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return None


def _refusal_of(compiler: Compiler, constraint: Constraint) -> str:
    try:
        compiler.compile(constraint)
    except ConstraintRefused as error:
        # The message may quote half a character.
        return str(error).encode(errors="replace").decode()
    except MemoryError:
        # Die as the library does when it is out of memory.
        os.abort()
    return ""


if __name__ == "__main__":
    main()
