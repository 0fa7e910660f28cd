"""Bounds the number of connections, the time and memory of headers, and the time that clients take
to read answers (`write_timeout.py`). Closes a connection whose request is refused before its body
arrives.

aiohttp bounds headers (128 lines of 8 kB) and idle time, but not the time of headers: a client that
sends one byte at a time could hold a connection for an hour. aiohttp would also keep all trailers
and further headers that arrive during an answer. Bodies have their own timeouts (`read_body.py`).
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

# Files for connections to shards, logs and libraries.
_OTHER_FILES = 512
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
# Up to this size, a request's bytes are accepted even from a client that holds too much memory, so
# that the client gets an error. During an answer, this also bounds the arriving bytes outside the
# body (trailers, further requests).
_SHORT_HEAD_BYTES = 16 * 1024
# The pause after the system refused to accept a connection, for example for lack of files.
_ACCEPT_AGAIN_S = 0.1
# The maximum of connections accepted in one turn of the event loop.
_ACCEPTS_A_TURN = 16
_HANDSHAKES_A_CLIENT = 16
# An unread body is discarded for this time, so that the client can read the answer.
_LINGER_S = 5.0
# By default the kernel accepts megabytes at once, then nothing until the client has read a third of
# them, which takes a slow reader longer than the write timeout. The kernel doubles this value.
_SEND_BUFFER_BYTES = 128 * 1024
_HTTP: dict[str, Any] = {
    "access_log": None,
    # aiohttp buffers this much of a body before the handler reads. A small buffer bounds the work
    # in one turn of the event loop, and reading is no slower.
    "read_bufsize": 32 * 1024,
    # Handlers inflate bodies while they read (`read_body.py`); aiohttp would inflate every body.
    "auto_decompress": False,
    # aiohttp would read the rest of an unread body; `Connection` closes instead.
    "lingering_time": 0.0,
}

# (text of an HTTP error) -> answer.
ErrorResponse = Callable[[str], web.Response]


class Runner(web.AppRunner):
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
        server = super().server
        if server is None:
            return None
        return cast(web.Server, ConnectionFactory(server, *self._limits, self._error_response))

    @asynccontextmanager
    async def listening(
        self, listener: socket.socket, tls: ssl.SSLContext | None
    ) -> AsyncIterator[None]:
        """Accept connections within the scope."""
        # Connections inherit the listener's buffer size.
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
    """Tell the connection when a request's headers are complete, and when it is answered."""
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
    """Write an answer's end. From now on, bytes after the request's body belong to the next
    request, even if this request's handler still runs.
    """
    await response.write_eof()
    if request.content.is_eof():
        cast(Connection, request.protocol).request_ends()


def _head_bytes(request: web.Request) -> int:
    """Return the length of the request line and headers, without optional whitespace."""
    line = len(f"{request.method} {request.raw_path} HTTP/1.1\r\n")
    headers = sum(len(name) + len(value) + len(": \r\n") for name, value in request.raw_headers)
    return line + headers + len("\r\n")


def _allowed(max_connections: int) -> int:
    """Return `max_connections`, or fewer if the process cannot open enough files: it could then not
    even refuse connections.
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
        # Held by the handshake that begins in this turn of the event loop.
        self._beginning = asyncio.Lock()
        # The semaphore of each client with handshakes that run or wait.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def __call__(self) -> Connection:
        return Connection(self, self._server)

    def accept_tls(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Accept connections until the listener is closed. asyncio's servers report no connection
        before its handshake is over, and no failed handshake.
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
        """Do a TLS handshake, which takes 1 ms. Each client has few handshakes at once, and only
        one begins in each turn of the event loop.
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
            # The handshake failed or timed out, or the client left.
            connection.leave()
        finally:
            turns.release()


class Connection(web.RequestHandler):
    __slots__ = (
        *("_begun", "_begun_before", "_body_bytes", "_client", "_door", "_ended", "_end_of_data"),
        *("_head", "_header_timer", "_is_last", "_request", "_unfinished", "write_timeout"),
    )

    def __init__(self, door: ConnectionFactory, server: web.Server) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **_HTTP)
        self._door = door
        # None if the connection is not counted.
        self._client: str | None = None
        # Bytes that belong to no request that has begun: the next headers, or trailers.
        self._head: Holding | None = None
        # The last 4 bytes that arrived.
        self._end_of_data = b""
        self._header_timer: asyncio.TimerHandle | None = None
        # The number of requests with complete headers, now and when the timer was set.
        self._begun = self._begun_before = 0
        # The last request until it is answered, and the counted number of its body's bytes.
        self._request: web.Request | None = None
        self._body_bytes = 0
        # The number of the request whose headers are incomplete.
        self._unfinished = 0
        # True if a request was answered before its body was read: nothing more is read then.
        self._is_last = False
        self._ended = asyncio.Event()
        # None: the connection was refused, or is not made yet.
        self.write_timeout: WriteTimeout | None = None

    def let_in(self, address: object) -> bool:
        """Count the connection from now on; false if its client has too many."""
        client = network_of(address[0]) if isinstance(address, tuple) else ""
        if not self._door.connections.allows(client, 1):
            return False
        self._door.connections.change(client, 1)
        self._client = client
        self._head = self._door.memory.hold(client)
        return True

    @property
    def client(self) -> str:
        """The connection's client; "" if the connection is not counted."""
        return self._client or ""

    def leave(self) -> None:
        """Stop counting the connection. Idempotent."""
        if self._client is not None and self._head is not None:
            self._door.connections.change(self._client, -1)
            self._head.close()
            self._client = self._head = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's TLS transport does not inherit from asyncio.Transport, but works like it.
        transport = cast(asyncio.Transport, transport)
        if self._client is None and not self.let_in(transport.get_extra_info("peername")):
            transport.write(_FULL)
            transport.close()
            self.force_close()
            return
        super().connection_made(transport)
        self.write_timeout = WriteTimeout(transport, self._door.write_timeout_s)
        # Begin only now: this may pause writing immediately, if a TLS handshake left unsent bytes.
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
        """Set the timer: part of a request's headers has arrived. If all have arrived,
        `request_begins` follows at once.
        """
        self._unfinished = self._begun + 1
        if self._header_timer is None:
            self._set_timer()

    def _count_body(self) -> bool:
        """Count the body's new bytes; true if there are any."""
        if self._request is None or self._head is None:
            return False
        body = self._request.content
        taken_bytes = body.total_bytes - self._body_bytes
        self._body_bytes = body.total_bytes
        self._take(taken_bytes)
        if taken_bytes and self._request.content_length is None and not body.is_eof():
            # The body is chunked: the remaining bytes only delimit its chunks.
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
        """Note that the request is answered, or that its handler failed. Idempotent."""
        self._request = None
        if self._head is None:
            return
        if self._end_of_data == b"\r\n\r\n":
            # The last bytes end headers, so no headers are incomplete.
            self._head.close()
        elif self._head.amount:
            self._time_head()

    async def answer_last(self, request: web.Request, response: web.StreamResponse) -> None:
        """Answer a request whose body was not read, and read no other request.

        A socket that is closed while bytes arrive is reset, and many clients then lose the answer.
        So discard arriving bytes for a while.
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
        """Answer bytes that aiohttp cannot parse, in the form of all other errors."""
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
            # The request with incomplete headers began after the timer was set.
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
