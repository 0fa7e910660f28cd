"""Trouble between processes, made on purpose: a proxy that loses or delays connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Trouble(Enum):
    """The trouble that a proxy makes for the connections through it."""

    NONE = "none"
    # Connections, new ones too, are closed with a reset.
    RESET = "reset"
    # Connections stay open and nothing passes, as with a host that is gone.
    HALF_OPEN = "half open"
    # Everything passes, but late.
    DELAY = "delay"
    # One bit of each large piece is flipped.
    FLIP = "flip"
    # A connection is closed in the middle of a large piece.
    TRUNCATE = "truncate"


# Pieces of at least so many bytes are large: mostly what is carried, and little of what frames it.
_LARGE_BYTES = 16_384


class Proxy:
    """A proxy that passes TCP on to `target`, with the trouble that is set."""

    def __init__(self, target: str, *, delay_s: float = 0.1) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._delay_s = delay_s
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self.trouble = Trouble.NONE
        self.address = ""
        # True once anybody has connected.
        self.was_reached = False

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def set(self, trouble: Trouble) -> None:
        """Set the trouble from now on. Connections that a reset cuts stay cut."""
        self.trouble = trouble
        if trouble is Trouble.HALF_OPEN:
            self._passing.clear()
        else:
            self._passing.set()
        if trouble is Trouble.RESET:
            for writer in list(self._writers):
                writer.transport.abort()

    async def close(self) -> None:
        self.set(Trouble.RESET)
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.was_reached = True
        if self.trouble is Trouble.RESET:
            writer.transport.abort()
            return
        try:
            behind_reader, behind_writer = await self._connect(writer)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, behind_writer}
        self._writers |= both
        try:
            await asyncio.gather(
                self._pass_on(reader, behind_writer), self._pass_on(behind_reader, writer)
            )
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _connect(self, client: asyncio.StreamWriter) -> Streams:
        """Connect to `target`, for this client's connection."""
        return await asyncio.open_connection(*self._target)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if self.trouble is Trouble.DELAY:
                    await asyncio.sleep(self._delay_s)
                await self._passing.wait()
                is_large = len(data) >= _LARGE_BYTES
                if self.trouble is Trouble.TRUNCATE and is_large:
                    writer.write(data[: len(data) // 2])
                    break
                if self.trouble is Trouble.FLIP and is_large:
                    middle = len(data) // 2
                    data = b"%b%c%b" % (data[:middle], data[middle] ^ 4, data[middle + 1 :])
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def proxies(*targets: str) -> AsyncIterator[list[Proxy]]:
    """A proxy in front of each target."""
    made = [Proxy(target) for target in targets]
    try:
        for proxy in made:
            await proxy.start()
        yield made
    finally:
        for proxy in made:
            await proxy.close()
