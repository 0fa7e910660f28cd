"""The metrics of all workers, added up in a separate process: reading their files takes tens of
milliseconds of Python, which holds the interpreter lock in any thread. The process is started at
the first scrape and ends with the worker that started it. Knows no HTTP.
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

from penstock_common.child_environment import child_environment
from penstock_router.errors import Unavailable

_LENGTH = struct.Struct("<I")
# Where the metrics of all workers are.
_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class _Family(msgspec.Struct, array_like=True):
    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


_decoder = msgspec.msgpack.Decoder(list[_Family])


class MergedMetrics:
    """The worker's side of that process; asks it one question at a time."""

    def __init__(self) -> None:
        # The process, and our end of its standard input and output.
        self._process: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._lock = asyncio.Lock()

    async def families(self) -> Iterator[Metric]:
        """All workers' metrics. Raises `Unavailable` if the process died; the next call restarts
        it.
        """
        async with self._lock:
            try:
                data = await self._ask()
            except BaseException as error:
                # Part of an answer may still be unread, so start anew.
                await self.close()
                if isinstance(error, EOFError | OSError):
                    raise Unavailable("the process that adds up metrics ended") from None
                raise
        return _metrics(_decoder.decode(data))

    async def _ask(self) -> bytes:
        if self._process is not None and self._process[0].poll() is not None:
            await self.close()
        if self._process is None:
            # Not in a thread, which could not be cancelled: some 2 ms, once.
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
            # Signals that a terminal sends to its process group are for the router.
            start_new_session=True,
            env=child_environment(_FOLDER_VARIABLE),
        )
    ours.setblocking(False)
    return process, ours


async def _receive(ours: socket.socket, num_bytes: int) -> bytes:
    """Receive this many bytes. Raises `EOFError` if the other end is closed."""
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
    """Answer each line of standard input until its end."""
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
