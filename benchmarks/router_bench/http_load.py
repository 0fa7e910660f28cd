"""HTTP/1.1 over bare sockets: a load that takes a few microseconds for an event.

`Streams` reads many streams at once, and keeps data with arrival times, for analysis after the
measurement. `Client` sends one request after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock_common import key_file_format

# The name under which shards serve.
MODEL = "bench"

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TEXT = re.compile(rb'"content": *"([^"]+)"')
# For a listening socket with a full backlog.
_CONNECT_TIMEOUT_S = 60.0
_LAST_CHUNK = b"0\r\n\r\n"
# An error in a stream, after its status.
_ERROR_EVENT = b'data: {"error"'


def write_keys(file: Path, *names: str) -> Path:
    """Write a file for --api-keys-file, in which each key is its own name."""
    hashes = {
        name: key_file_format.hash_of(key_file_format.digest_of(name.encode())) for name in names
    }
    file.write_text("".join(f"[[keys]]\nname = '{n}'\nhash = '{h}'\n" for n, h in hashes.items()))
    return file


def post(path: str, body: dict[str, Any], key: str = "") -> bytes:
    """Return the bytes of a request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    if key:
        head += f"Authorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def get(path: str) -> bytes:
    """Return the bytes of a request."""
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()


def chat(words: str = "hello", *, key: str = "", **fields: Any) -> bytes:
    """Return a chat request with an answer of exactly `max_tokens`."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": words}]}
    return post("/v1/chat/completions", {**body, "ignore_eos": True, **fields}, key)


def ends_body(data: bytes) -> bool:
    """Tell whether a read ends with a body's last chunk. Headers may also end in 0."""
    return data == _LAST_CHUNK or data.endswith(b"\n" + _LAST_CHUNK)


@dataclass(slots=True)
class Answer:
    """An answer so far. Times are those of `time.monotonic`; 0: not yet."""

    sent_s: float
    status: int = 0
    # When a stream's first text came.
    first_s: float = 0.0
    ended_s: float = 0.0
    error: str = ""
    chunks: list[tuple[float, bytes]] = field(default_factory=list)

    def events(self) -> list[tuple[float, str]]:
        """Return each event with text: when it was complete, and its text."""
        found: list[tuple[float, str]] = []
        rest = b""
        for at_s, data in self.chunks:
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                text = _TEXT.search(event)
                if text:
                    found.append((at_s, text[1].decode()))
        return found


# ---- Many streams ------------------------------------------------------------------------------


class Streams:
    """Requests with a connection each, read by one loop around epoll."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = connections
        self._epoll = select.epoll()
        self._reads: dict[int, tuple[Callable[[int], bytes], Answer]] = {}
        for connection in connections:
            connection.setblocking(False)
            self._epoll.register(connection, select.EPOLLIN)
            self._reads[connection.fileno()] = connection.recv, Answer(time.monotonic())

    @property
    def answers(self) -> list[Answer]:
        return [answer for _, answer in self._reads.values()]

    def read(self, timeout_s: float | None = None, *, until_readable: int | None = None) -> None:
        """Read what comes within `timeout_s`, or until that file is readable."""
        if until_readable is None:
            self._take(self._epoll.poll(timeout_s))
            return
        self._epoll.register(until_readable, select.EPOLLIN)
        while True:
            events = self._epoll.poll()
            self._take(event for event in events if event[0] != until_readable)
            if any(fileno == until_readable for fileno, _ in events):
                return

    def _take(self, events: Iterable[tuple[int, int]]) -> None:
        for fileno, _ in events:
            receive, answer = self._reads[fileno]
            try:
                data = receive(65_536)
            except OSError:
                data = b""
            now_s = time.monotonic()
            if not data:
                answer.ended_s = answer.ended_s or now_s
                self._epoll.unregister(fileno)
                continue
            answer.chunks.append((now_s, data))
            if ends_body(data):
                answer.ended_s = now_s
            elif not answer.first_s and _TEXT.search(data):
                answer.first_s = now_s

    def close(self) -> None:
        self._epoll.close()
        for connection in self._connections:
            connection.close()


def open_streams(port: int, request: bytes, count: int) -> Streams:
    """Send the request over `count` connections."""
    connections = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_TIMEOUT_S)
        connection.sendall(request)
        connections.append(connection)
    return Streams(connections)


# ---- One request after another -----------------------------------------------------------------


class Connection(asyncio.Protocol):
    """A connection, with one request at a time."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._head = b""
        # Missing bytes of a body with a known length; None for chunks, or before the headers.
        self._left: int | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes) -> asyncio.Future[Answer]:
        """Send a request. The future is done once the answer is complete or the connection is
        lost.
        """
        assert self._transport is not None
        self._head, self._left = b"", None
        self.answer = Answer(time.monotonic())
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        answer = self.answer
        if answer is None or answer.ended_s:
            return
        answer.chunks.append((now_s, data))
        if not answer.first_s and _TEXT.search(data):
            answer.first_s = now_s
        if _ERROR_EVENT in data:
            answer.error = "an event that is an error"
        if answer.status:
            self._take(data, now_s)
        else:
            self._take_head(self._head + data, now_s)

    def _take_head(self, data: bytes, now_s: float) -> None:
        assert self.answer is not None
        head, blank_line, body = data.partition(b"\r\n\r\n")
        if not blank_line:
            self._head = data
            return
        self.answer.status = int(head[9:12])
        length = _LENGTH.search(head)
        self._left = int(length[1]) if length else None
        self._take(body, now_s)

    def _take(self, body: bytes, now_s: float) -> None:
        if self._left is not None:
            self._left -= len(body)
            if self._left <= 0:
                self._end(now_s)
        elif ends_body(body):
            self._end(now_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answer is not None and not self.answer.ended_s:
            self.answer.error = "cut off"
            self._end(time.monotonic())

    def _end(self, now_s: float) -> None:
        assert self.answer is not None
        self.answer.ended_s = now_s
        if self._done is not None and not self._done.done():
            self._done.set_result(self.answer)


class Client:
    """Connections to a port, kept for later requests. Make it in a running loop."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._port = port
        self._tls = tls
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()

    async def connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, "127.0.0.1", self._port, ssl=self._tls
        )
        self._all.add(connection)
        return connection

    async def ask(self, request: bytes) -> Answer:
        """Send over a free connection. A failure to connect is an error in the answer."""
        begin_s = time.monotonic()
        self._idle = [each for each in self._idle if each.is_open]
        try:
            connection = self._idle.pop() if self._idle else await self.connect()
        except OSError as error:
            return Answer(begin_s, ended_s=time.monotonic(), error=str(error))
        answer = await connection.send(request)
        answer.sent_s = begin_s
        if connection.is_open:
            self._idle.append(connection)
        else:
            self._all.discard(connection)
        return answer

    def unanswered(self) -> list[Answer]:
        """List answers that have not ended."""
        answers = (each.answer for each in self._all)
        return [answer for answer in answers if answer is not None and not answer.ended_s]

    def close(self) -> None:
        for connection in self._all:
            connection.close()


@contextlib.asynccontextmanager
async def client(port: int, ca_file: Path | None = None) -> AsyncIterator[Client]:
    """Yield a client, over TLS if an authority's file is given."""
    tls = None if ca_file is None else ssl.create_default_context(cafile=str(ca_file))
    made = Client(port, tls)
    try:
        yield made
    finally:
        made.close()
