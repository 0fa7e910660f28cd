"""A child process that is spoken to over a socket, and ends itself when our end is closed."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock_common.child_environment import child_environment
from penstock_shard.ipc.process_group import end_group, kill_group

_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """`kill` ends it and all that it started, whatever they are doing. `wait` returns its exit
    status, negative for a signal, when they have ended; it raises `ProcessesRemain` if some do not.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    kill: Callable[[], None]
    wait: Callable[[], Awaitable[int]]


async def start_child(
    module: str,
    *needed: str,
    added: Mapping[str, str] = _NOTHING,
    output: int | None = None,
    arguments: Sequence[str] = (),
    descriptors: Sequence[int] = (),
    python: str = sys.executable,
) -> ChildProcess:
    """Run a module of `python`'s, whose first argument is its end of the socket.

    It gets the variables `needed` of our environment and those that are `added`, and `descriptors`
    under the same numbers; it writes to `output`, a file descriptor or a constant of
    `asyncio.subprocess`. Raises `OSError`.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(python, "-m", module, str(theirs.fileno()), *arguments),
                pass_fds=[theirs.fileno(), *descriptors],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A terminal's signals must reach the server only, which drains.
                start_new_session=True,
                env={**child_environment(*needed), **added},
            )
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:  # whatever it was, a process that was started ends itself upon this
        ours.close()
        raise

    async def wait() -> int:
        status = await process.wait()
        await end_group(process.pid)
        return status

    return ChildProcess(reader, writer, partial(kill_group, process.pid), wait)
