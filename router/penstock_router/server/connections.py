"""Bounds connections: their number, the time and memory of headers, and the time to read what is
written (`write_timeout.py`). Closes a connection whose request is refused before its body arrives.

aiohttp bounds headers (8 kB a line, 128 of them) and idle time, but not the time of headers: a
client that sends a byte at a time would hold a connection for an hour. aiohttp would also keep all
trailers and further headers that arrive while a request is answered. Bodies have their own timeouts
(`routes/base.py`). A connection counts from the moment it is accepted, including its TLS handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast
from weakref import WeakValueDictionary

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock_common.listening import BACKLOG
from penstock_router.admission.shared_budget import Holding, SharedBudget
from penstock_router.server.client_address import network_of
from penstock_router.server.write_timeout import WriteTimeout

logger = logging.getLogger(__name__)

# Open files of a process besides its connections: to shards, logs, libraries.
_OTHER_FILES = 512
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
# Received bytes of a request are accepted up to this size, so that a client that holds too much
# gets an error. While a request is answered, this also bounds bytes outside its body: trailers and
# further requests.
_SHORT_HEAD_BYTES = 16 * 1024
# The pause after the system refused to accept a connection, for example for lack of files.
_ACCEPT_AGAIN_S = 0.1
# Connections accepted in one turn of the event loop.
_ACCEPTS_A_TURN = 16
# TLS handshakes of one client at once.
_HANDSHAKES_A_CLIENT = 16
# The time for which an unread body is discarded, so that the client can read the answer.
_LINGER_S = 5.0
# Send buffer of a connection; the system doubles it for its own structures. By default the system
# accepts megabytes at once, and then nothing until the client has read a third of them. A slow
# reader takes longer for this than the write timeout.
_SEND_BUFFER_BYTES = 128 * 1024
_HTTP: dict[str, Any] = {
    "access_log": None,
    # Bytes of a body that aiohttp buffers before its handler reads. With few bytes, many long
    # bodies cause less work in one turn of the event loop. Reading is no slower.
    "read_bufsize": 32 * 1024,
    # Handlers inflate the bodies that they read (`routes/base.py`); aiohttp would inflate every
    # body.
    "auto_decompress": False,
    # aiohttp would continue to read a body that its handler did not read; `Connection` closes
    # instead.
    "lingering_time": 0.0,
}

# (text of an HTTP error) -> answer.
ErrorResponse = Callable[[str], web.Response]


class Runner(web.AppRunner):
    """An application's runner that bounds connections in number and time."""

    def __init__(
        self,
        app: web.Application,
        *,
        max_connections: int,
        header_timeout_s: float,
        write_timeout_s: float,
        memory: SharedBudget,
        error_response: ErrorResponse,
        **more: Any,
    ) -> None:
        app.middlewares.insert(0, _tell_connection)
        super().__init__(app, **more)
        self._limits = (_allowed(max_connections), header_timeout_s, write_timeout_s, memory)
        self._error_response = error_response

    @property
    def server(self) -> web.Server | None:
        """The protocol factory that aiohttp's sites use."""
        server = super().server
        if server is None:
            return None
        return cast(web.Server, ConnectionFactory(server, *self._limits, self._error_response))

    @asynccontextmanager
    async def listening(
        self, listener: socket.socket, tls: ssl.SSLContext | None
    ) -> AsyncIterator[None]:
        """Accept connections as long as the scope lasts."""
        # Connections inherit the buffer size from their listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if tls is None:
            site = web.SockSite(self, listener, backlog=BACKLOG)
            await site.start()
            yield
            await site.stop()
            return
        door = cast(ConnectionFactory, self.server)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        door.accept_tls(listener, tls)
        try:
            yield
        finally:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()


@web.middleware
async def _tell_connection(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: tells the connection when a request's headers are complete, and when it is
    answered.
    """
    connection = cast(Connection, request.protocol)
    connection.request_begins(request)
    try:
        response = await handler(request)
        if not request.content.is_eof():
            await connection.answer_last(request, response)
        return response
    finally:
        connection.request_ends()


async def end_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Write an answer's end. Bytes after the request's body now belong to the next request, even if
    this request's handler still runs.
    """
    await response.write_eof()
    if request.content.is_eof():
        cast(Connection, request.protocol).request_ends()


def _head_bytes(request: web.Request) -> int:
    """The length of the request line and headers, without optional whitespace."""
    line = len(f"{request.method} {request.raw_path} HTTP/1.1\r\n")
    headers = sum(len(name) + len(value) + len(": \r\n") for name, value in request.raw_headers)
    return line + headers + len("\r\n")


def _allowed(max_connections: int) -> int:
    """`max_connections`, or fewer if the limit of open files is lower. Beyond that limit the
    process could not even accept connections to refuse them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # Some systems have a bound below the reported hard limit.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    allowed = max(1, soft - _OTHER_FILES)
    logger.warning(
        "--max-connections %d: %d here, as the system allows %d open files (ulimit -n)",
        *(max_connections, allowed, soft),
    )
    return allowed


class ConnectionFactory:
    def __init__(
        self,
        server: web.Server,
        max_connections: int,
        header_timeout_s: float,
        write_timeout_s: float,
        memory: SharedBudget,
        error_response: ErrorResponse,
    ) -> None:
        self._server = server
        # Shared among clients: 1 for each connection.
        self.connections = SharedBudget(max_connections)
        self.header_timeout_s = header_timeout_s
        self.write_timeout_s = write_timeout_s
        self.memory = memory
        self.error_response = error_response
        self._handshakes: set[asyncio.Task[None]] = set()
        # The handshake that begins in this turn of the event loop holds this lock.
        self._beginning = asyncio.Lock()
        # By client, while one of its handshakes is under way.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def __call__(self) -> Connection:
        return Connection(self, self._server)

    def accept_tls(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Accept connections until the listener is closed. asyncio's own servers do not report a
        connection before its handshake is over, nor a failed handshake.
        """
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, context)

    def _accept(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS_A_TURN):
            try:
                accepted, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.error("cannot accept a connection: %s", error.strerror)
                loop.remove_reader(listener)
                loop.call_later(_ACCEPT_AGAIN_S, self.accept_tls, listener, context)
                return
            accepted.setblocking(False)
            connection = self()
            if not connection.let_in(address):
                accepted.close()
                continue
            task = loop.create_task(self._shake_hands(connection, accepted, context))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(
        self, connection: Connection, accepted: socket.socket, context: ssl.SSLContext
    ) -> None:
        """Do a TLS handshake, which takes a millisecond. Handshakes of one client take turns, and
        only one begins in each turn of the event loop.
        """
        turns = self._turns.setdefault(connection.client, asyncio.Semaphore(_HANDSHAKES_A_CLIENT))
        try:
            async with asyncio.timeout(self.header_timeout_s):
                await turns.acquire()
        except TimeoutError:
            connection.leave()
            accepted.close()
            return
        try:
            async with self._beginning:
                await asyncio.sleep(0)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=context,
                ssl_handshake_timeout=self.header_timeout_s,
                ssl_shutdown_timeout=self.header_timeout_s,
            )
        except OSError:
            # The handshake failed or took too long, or the client left.
            connection.leave()
        finally:
            turns.release()


class Connection(web.RequestHandler):
    """A connection in aiohttp's protocol: counted, with timeouts of headers and writes."""

    __slots__ = (
        *("_begun", "_begun_before", "_body_bytes", "_client", "_door", "_ended", "_end_of_data"),
        *("_head", "_header_timer", "_is_last", "_request", "_unfinished", "write_timeout"),
    )

    def __init__(self, door: ConnectionFactory, server: web.Server) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **_HTTP)
        self._door = door
        # The client, while the connection is counted.
        self._client: str | None = None
        # Bytes that belong to no request that has begun: the next one's headers, or trailers.
        self._head: Holding | None = None
        # The last few bytes that arrived.
        self._end_of_data = b""
        self._header_timer: asyncio.TimerHandle | None = None
        # Requests whose headers are complete, now and when the timer was set.
        self._begun = self._begun_before = 0
        # The last request until it is answered, and the counted bytes of its body.
        self._request: web.Request | None = None
        self._body_bytes = 0
        # Number of the request whose headers have arrived in part.
        self._unfinished = 0
        # True if nothing more is read, because a request was answered without reading its body.
        self._is_last = False
        self._ended = asyncio.Event()
        # None: the connection was refused, or is not made yet.
        self.write_timeout: WriteTimeout | None = None

    def let_in(self, address: object) -> bool:
        """Count the connection from now on, if its client may have one more."""
        client = network_of(address[0]) if isinstance(address, tuple) else ""
        if not self._door.connections.allows(client, 1):
            return False
        self._door.connections.change(client, 1)
        self._client = client
        self._head = self._door.memory.hold(client)
        return True

    @property
    def client(self) -> str:
        """The connection's client; "" if the connection is not counted any more."""
        return self._client or ""

    def leave(self) -> None:
        """Stop counting the connection. Idempotent."""
        if self._client is not None and self._head is not None:
            self._door.connections.change(self._client, -1)
            self._head.close()
            self._client = self._head = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's TLS transport is an asyncio.Transport in all but its class.
        transport = cast(asyncio.Transport, transport)
        if self._client is None and not self.let_in(transport.get_extra_info("peername")):
            transport.write(_FULL)
            transport.close()
            # Whatever arrives is ignored.
            self.force_close()
            return
        super().connection_made(transport)
        self.write_timeout = WriteTimeout(transport, self._door.write_timeout_s)
        # Begin only now: it may pause writing immediately, if a TLS handshake left unsent bytes.
        self.write_timeout.begin()
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        # aiohttp also calls this without data, when it continues with buffered data.
        if self._is_last or self._head is None:
            return
        self._head.add(len(data))
        self._end_of_data = (self._end_of_data + data[-4:])[-4:]
        is_long = self._head.amount > _SHORT_HEAD_BYTES
        if self._request is None and is_long and self._head.is_over:
            self._cut_off()
            return
        super().data_received(data)
        has_grown = self._count_body()
        if data and self._request is None:
            self._time_head()
        elif data and is_long and not has_grown:
            self._cut_off()

    def _cut_off(self) -> None:
        if self._head is not None:
            self._head.close()
        self.force_close()

    def _time_head(self) -> None:
        """Set the timer: a request's headers have arrived in part. If they are complete,
        `request_begins` follows in a moment.
        """
        self._unfinished = self._begun + 1
        if self._header_timer is None:
            self._set_timer()

    def _count_body(self) -> bool:
        """Count the bytes that belong to the body; true if there are any."""
        if self._request is None or self._head is None:
            return False
        body = self._request.content
        taken_bytes = body.total_bytes - self._body_bytes
        self._body_bytes = body.total_bytes
        self._take(taken_bytes)
        if taken_bytes and self._request.content_length is None and not body.is_eof():
            # The remaining bytes delimit the body's chunks.
            self._head.close()
        return taken_bytes > 0

    def _take(self, num_bytes: int) -> None:
        if self._head is not None:
            self._head.shrink(min(num_bytes, self._head.amount))

    def request_begins(self, request: web.Request) -> None:
        self._begun += 1
        self._request = request
        self._body_bytes = 0
        self._take(_head_bytes(request))
        self._count_body()

    def request_ends(self) -> None:
        """Note that the request is answered, or its handler failed. Idempotent."""
        self._request = None
        if self._head is None:
            return
        if self._end_of_data == b"\r\n\r\n":
            # No incomplete headers are left, because these bytes end headers.
            self._head.close()
        elif self._head.amount:
            self._time_head()

    async def answer_last(self, request: web.Request, response: web.StreamResponse) -> None:
        """Answer a request whose body was not read, and read no other request.

        A socket that is closed while bytes arrive is reset, and many clients then lose an unread
        answer. So for a while arriving bytes are discarded.
        """
        self._is_last = True
        response.force_close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await response.prepare(request)
                await response.write_eof()
                if self.transport is not None:
                    if self.transport.can_write_eof():
                        self.transport.write_eof()
                    # aiohttp paused reading if much of the body has arrived.
                    self.transport.resume_reading()
                    await self._ended.wait()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that aiohttp cannot read, in the form of all other errors."""
        response = super().handle_error(request, status, exc, message)
        if status != 400 or message is None:
            return response
        # Drop the lines that show the place in the data.
        reason = " ".join(message.partition("\n\n")[0].split()).rstrip(":")
        response = self._door.error_response(reason)
        response.force_close()
        return response

    def _set_timer(self) -> None:
        self._begun_before = self._begun
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self._door.header_timeout_s, self._time_is_up)

    def _time_is_up(self) -> None:
        self._header_timer = None
        if self._begun == self._begun_before:
            self.force_close()
        elif self._begun < self._unfinished:
            # The request began after the timer was set.
            self._set_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.leave()
        self._ended.set()
        if self._header_timer is not None:
            self._header_timer.cancel()
        if self.write_timeout is not None:
            self.write_timeout.end()
            # Break the reference cycle with the transport.
            self.write_timeout = None
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        if self.write_timeout is not None:
            self.write_timeout.pause()
        super().pause_writing()

    def resume_writing(self) -> None:
        if self.write_timeout is not None:
            self.write_timeout.resume()
        super().resume_writing()
