"""Starts children that run a module of Python's, each with its ends of sockets.

A child ends itself when our ends are closed, and so ends with this process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from penstock_common.child_environment import child_environment
from penstock_common.child_process.process_group import end_group, kill_group

_NOTHING: Mapping[str, str] = {}
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """`kill` ends it and all that it started, whatever they are doing. `wait` returns its exit
    status, negative for a signal, when they have ended; it raises `ProcessesRemain` if some do not.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    kill: Callable[[], None]
    wait: Callable[[], Awaitable[int]]
    # The streams of its other sockets.
    more: Sequence[Streams] = ()


async def start_child(
    module: str,
    *needed: str,
    added: Mapping[str, str] = _NOTHING,
    output: int | None = None,
    arguments: Sequence[str] = (),
    descriptors: Sequence[int] = (),
    python: str = sys.executable,
    num_sockets: int = 1,
) -> ChildProcess:
    """Run a module of `python`'s, whose first arguments are its ends of the sockets.

    It gets the variables `needed` of our environment and those that are `added`, and `descriptors`
    under the same numbers; it writes to `output`, a file descriptor or a constant of
    `asyncio.subprocess`. Raises `OSError`.
    """
    with _sockets(num_sockets) as (ours, theirs):
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", module, *map(str, theirs), *arguments),
            pass_fds=[*theirs, *descriptors],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A terminal's signals must reach the server only, which drains.
            start_new_session=True,
            env={**child_environment(*needed), **added},
        )
        streams, *more = [await asyncio.open_connection(sock=each) for each in ours]

    async def wait() -> int:
        status = await process.wait()
        await end_group(process.pid)
        return status

    return ChildProcess(*streams, partial(kill_group, process.pid), wait, more)


def start_beside(module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module in this process's group, whose first argument is its end of the socket that is
    returned. It imports from the same paths as this process, not from its working directory. Raises
    `OSError`.
    """
    with _sockets(1) as ([ours], [theirs]):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs), *arguments],
            pass_fds=[theirs],
            stdin=subprocess.DEVNULL,
            env={**child_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return process, ours


@contextmanager
def _sockets(count: int) -> Iterator[tuple[list[socket.socket], list[int]]]:
    """Yield our ends, and the descriptors of a child's, which are closed at the end of the scope;
    if it fails, ours are closed too.
    """
    with ExitStack() as ours, ExitStack() as theirs:
        pairs = [socket.socketpair() for _ in range(count)]
        yield (
            [ours.enter_context(each) for each, _ in pairs],
            [theirs.enter_context(each).fileno() for _, each in pairs],
        )
        ours.pop_all()
