"""The router's end: starts a process, talks to it without blocking the event loop, ends it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

from penstock_common.child_environment import child_environment
from penstock_router.child_process.framing import HEADER, PIECE_BYTES


class ChildProcess:
    def __init__(self, module: str, *arguments: str) -> None:
        """Start `python -m MODULE FD ARGUMENTS`. The child ends whenever this process ends. Raise
        `OSError` if it cannot start.
        """
        # The child imports from the same paths as this process, not from its working directory.
        environment = {**child_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._socket, its_end = socket.socketpair()
        self._socket.setblocking(False)
        with its_end:
            fd = its_end.fileno()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(fd), *arguments],
                    pass_fds=(fd,),
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            except OSError:
                self._socket.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def send(self, message: bytes, pieces: Iterable[bytes] = ()) -> None:
        """Send a message, and then the pieces. Raise `OSError` if the process died."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, message)
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), PIECE_BYTES):
                await loop.sock_sendall(self._socket, view[start : start + PIECE_BYTES])
                # `sock_sendall` does not yield to the event loop if the socket accepts the piece at
                # once.
                await asyncio.sleep(0)

    async def receive_message(self) -> mmap:
        """Receive a message, without its length. Raise `EOFError` or `OSError` if the
        process died.
        """
        [num_bytes] = HEADER.unpack(await self.receive(HEADER.size))
        return await self.receive(num_bytes)

    async def receive(self, num_bytes: int) -> mmap:
        """Receive `num_bytes` bytes, at least 1. Raise like `receive_message`."""
        loop = asyncio.get_running_loop()
        # mmap clears pages as they are filled, not all at once, which would take milliseconds.
        # Private pages are freed in half the time of shared ones.
        data = mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        view = memoryview(data)
        while view:
            received = await loop.sock_recv_into(self._socket, view[:PIECE_BYTES])
            if not received:
                raise EOFError
            view = view[received:]
            await asyncio.sleep(0)
        return data

    async def kill(self) -> int:
        """Kill the process; return its exit status (negative for a signal)."""
        self._process.kill()
        self._socket.close()
        return await asyncio.to_thread(self._process.wait)
