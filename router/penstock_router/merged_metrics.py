"""What all workers count, added up in a process of its own: reading their files takes tens of
milliseconds of Python, in which no event loop gets a turn, whatever the thread. Started with the
first question, it ends with the worker that asks. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, multiprocess
from prometheus_client.core import Metric

from penstock_router.errors import Unavailable

_LENGTH = struct.Struct("<I")


class _Family(msgspec.Struct, array_like=True):
    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


_decoder = msgspec.msgpack.Decoder(list[_Family])


class MergedMetrics:
    """Asks that process, one question at a time."""

    def __init__(self) -> None:
        # The process, and our end of its standard input and output.
        self._process: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._lock = asyncio.Lock()

    async def families(self) -> Iterator[Metric]:
        """Raises `Unavailable` where the process ended meanwhile; the next question starts it."""
        async with self._lock:
            try:
                data = await self._ask()
            except BaseException as error:
                # Half of an answer may be left of it.
                await self.close()
                if isinstance(error, EOFError | OSError):
                    raise Unavailable("the process that adds up metrics ended") from None
                raise
        return _metrics(_decoder.decode(data))

    async def _ask(self) -> bytes:
        if self._process is not None and self._process[0].poll() is not None:
            await self.close()
        if self._process is None:
            # Here and not in a thread, where it could not be given up: some 2 ms, once.
            self._process = _start()
        ours = self._process[1]
        await asyncio.get_running_loop().sock_sendall(ours, b"\n")
        (length,) = _LENGTH.unpack(await _receive(ours, _LENGTH.size))
        return await _receive(ours, length)

    async def close(self) -> None:
        if self._process is not None:
            (process, ours), self._process = self._process, None
            ours.close()
            process.kill()
            await asyncio.to_thread(process.wait)


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            # What a terminal sends to its process group is for the router.
            start_new_session=True,
        )
    ours.setblocking(False)
    return process, ours


async def _receive(ours: socket.socket, num_bytes: int) -> bytes:
    """So many bytes. Raises `EOFError` where the other end is closed."""
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < num_bytes:
        piece = await loop.sock_recv(ours, num_bytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _metrics(families: Iterable[_Family]) -> Iterator[Metric]:
    for found in families:
        family = Metric(found.name, found.text, found.kind)
        for name, labels, value in found.samples:
            family.add_sample(name, labels, value)
        yield family


# ---- the process -------------------------------------------------------------------------------


def main() -> None:
    """Answer each line until there are no more."""
    output = sys.stdout.buffer
    for _ in iter(sys.stdin.buffer.readline, b""):
        data = msgspec.msgpack.encode(_merged())
        output.write(_LENGTH.pack(len(data)) + data)
        output.flush()


def _merged() -> list[_Family]:
    collected = CollectorRegistry()
    multiprocess.MultiProcessCollector(collected)  # type: ignore[no-untyped-call]
    return [
        _Family(
            family.name,
            family.documentation,
            family.type,
            [(sample.name, sample.labels, sample.value) for sample in family.samples],
        )
        for family in collected.collect()
    ]


if __name__ == "__main__":
    main()
