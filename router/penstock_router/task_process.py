"""A process beside the router that does one task at a time, and blocks no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

from penstock_common.child_process.framing import HEADER_BYTES, PIECE_BYTES, decode_header
from penstock_common.child_process.start import start_beside


class TaskProcess:
    def __init__(self, module: str, *arguments: str) -> None:
        """Start `python -m MODULE FD ARGUMENTS`. The child ends whenever this process ends. Raise
        `OSError` if it cannot start.
        """
        self._process, self._socket = start_beside(module, *arguments)
        self._socket.setblocking(False)

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
        """Receive a message's msgpack. Raise `EOFError` or `OSError` if the process died, or
        sent none.
        """
        num_bytes = decode_header(bytes(await self.receive(HEADER_BYTES)))
        if num_bytes is None:
            raise EOFError
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
