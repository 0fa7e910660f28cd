"""An engine process as its supervisor sees it: our end of its link, its death and its exit status.

Starts the real one; what starts another is handed to the supervisor.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock_common.child_environment import HUB, child_environment


class EngineProcess(Protocol):
    """A process that reads and writes the messages of `ipc/messages.py`."""

    @property
    def reader(self) -> asyncio.StreamReader:
        """What it says."""

    @property
    def writer(self) -> asyncio.StreamWriter:
        """What it is told; it ends itself when this is closed."""

    def kill(self) -> None:
        """End it, whatever it is doing."""

    async def wait(self) -> int:
        """Its exit status once it has ended; negative for a signal."""


# Raises `OSError` where the system refuses, for lack of memory or descriptors say.
StartProcess = Callable[[], Awaitable[EngineProcess]]


class _ChildProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.reader, self.writer = reader, writer
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        return await self._process.wait()


async def start_engine_process() -> EngineProcess:
    """Start the process of `engine/main.py`. Raises `OSError`."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await _engine_main(theirs)
        return _ChildProcess(process, *await asyncio.open_connection(sock=ours))
    except BaseException:  # whatever it was, a process that was started ends itself upon this
        ours.close()
        raise


async def _engine_main(its_end: socket.socket) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock_shard.engine.main",
        str(its_end.fileno()),
        pass_fds=[its_end.fileno()],
        stdin=asyncio.subprocess.DEVNULL,
        # A terminal's signals must reach the server only, which drains.
        start_new_session=True,
        # OpenMP threads that spin while they wait would take the processor from other threads.
        env={"OMP_WAIT_POLICY": "PASSIVE", **child_environment(*HUB)},
    )
