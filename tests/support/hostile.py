"""Peers that mean no good: what they send, and what a service looks like meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp
import psutil

from support.processes import Service

# In what is sent: a log that repeats much of it lets strangers write it.
MARK = "Y4nk33"
_AT_A_TIME = 50


def garbage(rng: random.Random) -> bytes:
    """Bytes that begin as something that is spoken here, or as nothing."""
    begin = rng.choice(
        [
            b"",
            b"GET / HTTP/1.1\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
            # The first bytes of a TLS handshake.
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            MARK.encode() * 20,
        ]
    )
    return begin + rng.randbytes(rng.choice([0, 1, 9, 100, 1000, 20_000]))


async def send(
    address: str, data: bytes | Sequence[bytes], *, wait_s: float = 2.0, tls: bool = False
) -> bytes:
    """Open a connection, send, and read what comes until its end or for a while."""
    host, port = address.split(":")
    context = ssl._create_unverified_context() if tls else None
    pieces = [data] if isinstance(data, bytes) else data
    answer = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(wait_s):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                while piece := await reader.read(65536):
                    answer += piece
            finally:
                writer.transport.abort()
    return answer


async def many(jobs: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run them, some at a time."""
    pending = iter(jobs)

    async def work() -> None:
        for job in pending:
            await job()

    await asyncio.gather(*(work() for _ in range(_AT_A_TIME)))


@dataclass(slots=True)
class Usage:
    """The memory (MiB) and open files of a process and its children."""

    rss_mb: float
    fds: int

    @classmethod
    def of(cls, service: Service) -> Usage:
        own = psutil.Process(service.process.pid)
        family = [own, *own.children(recursive=True)]
        rss = sum(process.memory_info().rss for process in family)
        return cls(rss / 2**20, sum(process.num_fds() for process in family))


@dataclass(slots=True)
class Prober:
    """A user of the service, all the while."""

    url: str
    headers: dict[str, str]
    took_s: list[float] = field(default_factory=list)

    async def ask(self, session: aiohttp.ClientSession) -> None:
        begun_s = time.monotonic()
        body = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
        async with session.post(self.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert (await answer.json())["usage"]["completion_tokens"] == 3
        self.took_s.append(time.monotonic() - begun_s)

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Ask before, all the time, and after."""
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(headers=self.headers, timeout=timeout) as session:
            await self.ask(session)
            over = asyncio.Event()

            async def keep_asking() -> None:
                while not over.is_set():
                    await self.ask(session)
                    await asyncio.sleep(0.02)

            task = asyncio.create_task(keep_asking())
            try:
                yield
            finally:
                over.set()
                await task
            await self.ask(session)

    def summary(self) -> str:
        return f"{len(self.took_s)} asked, median {statistics.median(self.took_s):.3f} s, " + (
            f"worst {max(self.took_s):.3f} s"
        )


def nested(depth: int) -> bytes:
    """A body whose prompt is arrays in arrays."""
    return b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"


def http_post(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    """A request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if not any(header.startswith(("Content-Length", "Transfer-")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    """Return the HTTP status of an answer; 0 without an answer."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def echo(line: str) -> int:
    """Return the number of characters in a line of a log that repeat what a stranger sent."""
    return line.count(MARK) * len(MARK)


def messages(log: str) -> list[str]:
    """Return the lines of a log. A line of JSON becomes its message and all its other values."""
    found = []
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            found.append(line)
        else:
            found.append(" ".join([entry.pop("message"), *map(str, entry.values())]))
    return found
