"""Malicious clients, which tie up a router's resources by slow and greedy requests.

All attacks run at once in a process, from an address of its own, for a given time. Constants bound
their connections and bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.router_bench.servers import Pipe

# Connections of each attack.
_BOMBS = 8
_UNREAD_ANSWERS = 6
_SLOW_BODIES = 70
_UNREAD_STREAMS = 4
_SILENT_CONNECTIONS = 300
_ENDLESS_TEMPLATES = 4
_STORING = 4

_BOMB_BYTES = 10**9
_SLOW_BODY_BYTES = 33_000_000
_LONG_BYTES = 70_000
# With 20 log-probabilities for each of these tokens, an answer has about 30 MB.
_PROMPT_TOKENS = 15_000
_STREAM_CHOICES = 16
_STORED_BYTES = 200_000
_PAUSE_S = 1.0
# Then a client that waits begins again.
_PATIENCE_S = 15.0
_ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


# The model of a separate shard, because attacks are not on the honest shard's time.
ATTACKED_MODEL = "attacked"


@dataclass(slots=True)
class Target:
    """The target of an attacker, and the results."""

    port: int
    ca_file: Path
    # "": without a key.
    key: str
    address: str
    # For clients without a handshake, because handshakes of one address wait for each other.
    silent_address: str
    statuses: Counter[str] = field(default_factory=Counter)

    def head(self, path: str, length: int, *more: str) -> bytes:
        """Return the headers of a POST of JSON."""
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: bench",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
            *more,
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    def post(self, path: str, body: dict[str, Any], *more: str) -> bytes:
        data = json.dumps({"model": ATTACKED_MODEL, **body}).encode()
        return self.head(path, len(data), *more) + data

    @contextlib.asynccontextmanager
    async def connected(
        self, receive_bytes: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a TLS connection with a receive buffer of this size; reset it at the end."""
        tls = ssl.create_default_context(cafile=str(self.ca_file))
        limit = receive_bytes or 2**16
        with await self.opened(self.port, receive_bytes) as own:
            reader, writer = await asyncio.open_connection(
                sock=own, ssl=tls, server_hostname="127.0.0.1", limit=limit
            )
            try:
                yield reader, writer
            finally:
                writer.transport.abort()

    async def opened(
        self, port: int, receive_bytes: int | None = None, address: str = ""
    ) -> socket.socket:
        """Open a TCP connection."""
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if receive_bytes is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        own.setblocking(False)
        own.bind((address or self.address, 0))
        try:
            await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
        except BaseException:
            own.close()
            raise
        return own

    async def status(self, what: str, reader: asyncio.StreamReader) -> None:
        """Count the answer's status."""
        line = await reader.readline()
        self.statuses[f"{what} {line[9:12].decode() or 'cut off'}"] += 1


Attack = Callable[[Target], Awaitable[None]]


async def _inflate(target: Target) -> None:
    """Send a body of a megabyte that unpacks to a gigabyte."""
    bomb = _bomb()
    async with target.connected() as (reader, writer):
        writer.write(target.head("/v1/completions", len(bomb), "Content-Encoding: gzip"))
        writer.write(bomb)
        await writer.drain()
        await target.status("bomb", reader)


_bombs: list[bytes] = []


def _bomb() -> bytes:
    if not _bombs:
        _bombs.append(_packed_spaces(_BOMB_BYTES // 10**6))
    return _bombs[0]


def _packed_spaces(megabytes: int) -> bytes:
    """Return spaces in gzip's format. Pack one megabyte and repeat it, which is allowed after a
    full flush, because packing a thousand takes seconds.
    """
    spaces = b" " * 10**6
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    packed = packer.compress(spaces) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = 0
    for _ in range(megabytes):
        checksum = zlib.crc32(spaces, checksum)
    head = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
    end = struct.pack("<II", checksum, megabytes * len(spaces) % 2**32)
    return head + packed * megabytes + packer.flush() + end


async def _leave_answer_unread(target: Target) -> None:
    body = {"prompt": [[300 + i % 900 for i in range(_PROMPT_TOKENS)]], "max_tokens": 1}
    request = target.post("/v1/completions", {**body, "prompt_logprobs": 20, "seed": 1})
    async with target.connected(4096) as (reader, writer):
        writer.write(request)
        await writer.drain()
        await target.status("unread answer", reader)
        await asyncio.sleep(_PATIENCE_S)


async def _send_slowly(target: Target) -> None:
    async with target.connected() as (reader, writer):
        writer.write(target.head("/v1/completions", _SLOW_BODY_BYTES))
        writer.write(b" " * _LONG_BYTES)
        answered = asyncio.ensure_future(target.status("slow body", reader))
        try:
            while not answered.done():
                writer.write(b" ")
                await asyncio.wait((answered,), timeout=1.0)
            await answered
        finally:
            answered.cancel()


async def _leave_stream_unread(target: Target) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 50_000, "ignore_eos": True}
    request = target.post(
        "/v1/completions", {**body, "n": _STREAM_CHOICES, "logprobs": 20}, "x-penstock-resumable: 1"
    )
    async with target.connected(4096) as (reader, writer):
        writer.write(request)
        await target.status("unread stream", reader)
        await asyncio.sleep(_PATIENCE_S)


async def _say_nothing(target: Target) -> None:
    """Connect without handshake and request."""
    with await target.opened(target.port, address=target.silent_address) as own:
        await asyncio.get_running_loop().sock_recv(own, 1)
        target.statuses["silent closed"] += 1


async def _template(target: Target) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "chat_template": _ENDLESS, "max_tokens": 1}
    async with target.connected() as (reader, writer):
        writer.write(target.post("/v1/chat/completions", body))
        await target.status("template", reader)


async def _store(target: Target) -> None:
    body = {"input": "word " * (_STORED_BYTES // 5), "max_output_tokens": 1, "store": True}
    async with target.connected() as (reader, writer):
        writer.write(target.post("/v1/responses", body))
        await writer.drain()
        await target.status("stored", reader)


_ATTACKS: tuple[tuple[Attack, int], ...] = (
    (_inflate, _BOMBS),
    (_leave_answer_unread, _UNREAD_ANSWERS),
    (_send_slowly, _SLOW_BODIES),
    (_leave_stream_unread, _UNREAD_STREAMS),
    (_say_nothing, _SILENT_CONNECTIONS),
    (_template, _ENDLESS_TEMPLATES),
    (_store, _STORING),
)


def attack(pipe: Pipe, target: Target, seconds: float) -> None:
    """Run all attacks for `seconds`; send the number of answers by kind."""

    async def repeat(one: Attack) -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await one(target)
            await asyncio.sleep(_PAUSE_S)

    async def run() -> None:
        tasks = [asyncio.create_task(repeat(one)) for one, n in _ATTACKS for _ in range(n)]
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    # This work belongs to another machine.
    os.nice(19)
    _bomb()
    pipe.send("ready")
    asyncio.run(run())
    pipe.send(dict(target.statuses))
