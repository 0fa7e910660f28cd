"""What all workers count, added up in a process of its own: reading their files takes tens of
milliseconds of Python, in which no event loop gets a turn, whatever the thread. Started with the
first question, it ends with the worker that asks. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
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
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def families(self) -> Iterator[Metric]:
        """Raises `Unavailable` where the process ended meanwhile; the next question starts it."""
        async with self._lock:
            try:
                data = await self._ask()
            except BaseException as error:
                # Half of an answer may be left of it.
                await self.close()
                if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                    raise Unavailable("the process that adds up metrics ended") from None
                raise
        return _metrics(_decoder.decode(data))

    async def _ask(self) -> bytes:
        if self._process is None or self._has_ended(self._process):
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __name__),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # What a terminal sends to its process group is for the router.
                start_new_session=True,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(b"\n")
        (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
        return await stdout.readexactly(length)

    @staticmethod
    def _has_ended(process: asyncio.subprocess.Process) -> bool:
        return process.returncode is not None or process.stdin is None or process.stdin.is_closing()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


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
