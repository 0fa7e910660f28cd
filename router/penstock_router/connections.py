"""Connections: how many there may be, and how long each may take to send a request's headers.

aiohttp bounds what headers are (8 kB a line, 128 of them) and how long a connection may be idle,
but not how long headers take: a client that sends a byte at a time would hold a connection for an
hour. Bodies have timeouts of their own (`routes/base.py`). Knows nothing of what requests ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler

logger = logging.getLogger(__name__)

# Open files of a process besides its connections: to shards, logs, libraries.
_OTHER_FILES = 512
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class Runner(web.AppRunner):
    """An application's runner whose connections are bounded in number and in time."""

    def __init__(
        self, app: web.Application, *, max_connections: int, header_timeout_s: float, **more: Any
    ) -> None:
        app.middlewares.insert(0, _tell_connection)
        super().__init__(app, **more)
        self._max_connections = _allowed(max_connections)
        self._header_timeout_s = header_timeout_s

    @property
    def server(self) -> web.Server | None:
        """The protocol factory that aiohttp's sites use."""
        server = super().server
        if server is None:
            return None
        return cast(web.Server, Door(server, self._max_connections, self._header_timeout_s))


@web.middleware
async def _tell_connection(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: tells the connection when a request's headers are complete, and its answer."""
    transport = request.transport
    connection = None if transport is None else transport.get_protocol()
    if not isinstance(connection, _Connection):
        # The connection was closed before its request was handled.
        return await handler(request)
    connection.request_begins()
    try:
        return await handler(request)
    finally:
        connection.request_ends()


def _allowed(max_connections: int) -> int:
    """`max_connections`, or as many as the limit of open files allows: beyond that the process
    could not even accept connections to refuse them.
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


class Door:
    """Makes the protocol of each connection to a server."""

    def __init__(self, server: web.Server, max_connections: int, header_timeout_s: float) -> None:
        self._server = server
        self.max_connections = max_connections
        self.header_timeout_s = header_timeout_s
        self.num_open = 0

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self, self._server())


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol, and enforces the timeout of headers."""

    __slots__ = (
        *("_begun", "_begun_before", "_door", "_http", "_is_answering", "_loop", "_timer"),
        *("_transport", "_unfinished"),
    )

    def __init__(self, door: Door, http: web.RequestHandler) -> None:
        self._door = door
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # Requests whose headers have come, and how many had when the timer was set.
        self._begun = self._begun_before = 0
        # The last request has no answer yet.
        self._is_answering = False
        # The number of the request whose headers have arrived in part.
        self._unfinished = 0
        # None: the connection was refused.
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's TLS transport is an asyncio.Transport in all but its class.
        transport = cast(asyncio.Transport, transport)
        if self._door.num_open >= self._door.max_connections:
            transport.write(_FULL)
            transport.close()
            return
        self._door.num_open += 1
        self._transport = transport
        self._http.connection_made(transport)
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._http.data_received(data)
        if not self._is_answering:
            # If these were the last of its headers, `request_begins` follows in a moment.
            self._unfinished = self._begun + 1
            if self._timer is None:
                self._set_timer()

    def request_begins(self) -> None:
        self._begun += 1
        self._is_answering = True

    def request_ends(self) -> None:
        self._is_answering = False

    def _set_timer(self) -> None:
        self._begun_before = self._begun
        self._timer = self._loop.call_later(self._door.header_timeout_s, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        if self._begun == self._begun_before:
            self._http.force_close()
        elif self._begun < self._unfinished:
            # The request began after the timer was set.
            self._set_timer()

    def eof_received(self) -> bool | None:
        if self._transport is not None:
            self._http.eof_received()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:
            return
        self._door.num_open -= 1
        if self._timer is not None:
            self._timer.cancel()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._http.resume_writing()
