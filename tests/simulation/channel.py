"""A grpc.aio channel and server in memory: what calls do, over `network.py` in place of sockets.

Messages pass as bytes. As in grpc.aio, a cancelled read or write cancels its call, writes wait for
room in a window, and a call ends with one status. `tests/integration/test_memory_channel.py` holds
both to the same behaviour.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from penstock_proto.transport import Connector
from simulation.network import CONNECT_S, Connection, Lane, Listener, Network, Way
from simulation.virtual_time import Process

# As `transport.channel_options` has them.
_FIRST_BACK_OFF_S = 0.1
_MAX_BACK_OFF_S = 1.0

_REFUSED = "Failed to connect to remote host: Connection refused"
_TIMED_OUT = "failed to connect to all addresses: FD Shutdown: connect timed out"
_EOF = grpc.aio.EOF


@dataclass(frozen=True)
class Status:
    """The end of a call: its status code, and what comes with it."""

    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, str], ...] = ()
    # True if the caller cancelled the call.
    is_local: bool = False

    def error(self) -> BaseException:
        if self.is_local:
            return asyncio.CancelledError()
        return grpc.aio.AioRpcError(
            self.code,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(*self.trailing),
            details=self.details,
            debug_error_string=self.details,
        )


_OK = Status(grpc.StatusCode.OK)
_CUT = Status(grpc.StatusCode.UNAVAILABLE, "Socket closed")
# What else gRPC calls it where a call has much to say.
_CUT_AMID_MESSAGES = (
    _CUT,
    Status(grpc.StatusCode.INTERNAL, "RST_STREAM with error code"),
    Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "RST_STREAM: too many frames"),
)


@dataclass(frozen=True)
class _Message:
    data: bytes
    # The network made it: nobody waits for room for it.
    is_copy: bool = False


class _Begin:
    """A call begins."""


class _HalfClose:
    """The client will write no more."""


class _Cancel:
    """The client has left the call."""


class _Window:
    """The bytes that a writer may be ahead of the reader at the other end."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._unread_bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait_for_room(self) -> None:
        while self._unread_bytes >= self._size_bytes:
            room = asyncio.get_running_loop().create_future()
            self._waiting.append(room)
            await room

    def sent(self, data: bytes) -> None:
        self._unread_bytes += len(data)

    def was_read(self, data: bytes) -> None:
        self._unread_bytes -= len(data)
        if self._unread_bytes < self._size_bytes:
            self.open()

    def open(self) -> None:
        """Let all waiting writers go on."""
        while self._waiting:
            room = self._waiting.popleft()
            if not room.done():
                room.set_result(None)


class _Inbox:
    """The messages that have arrived at one end of a call."""

    def __init__(self, window: _Window) -> None:
        self.window = window
        self._frames: deque[object] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.is_over = False

    def put(self, frame: object) -> None:
        self._frames.append(frame)
        self._wake()

    def end(self) -> None:
        """Note that nothing more will arrive."""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> bytes | None:
        """Return the next message; None at the end."""
        while not self._frames:
            if self.is_over:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        frame = self._frames.popleft()
        if not isinstance(frame, _Message):
            self.is_over = True
            return None
        if not frame.is_copy:
            self.window.was_read(frame.data)
        return frame.data


# ---- the client's end ---------------------------------------------------------------------------


class _Call:
    """A call at its caller's end, to read and write, to iterate, or to await its only answer."""

    def __init__(
        self,
        channel: MemoryChannel,
        method: str,
        serializer: Callable[[Any], bytes],
        deserializer: Callable[[bytes], Any],
        timeout_s: float | None,
    ) -> None:
        self._channel = channel
        self._method = method
        self._serializer, self._deserializer = serializer, deserializer
        self._status: Status | None = None
        size_bytes = channel.network.window_bytes
        self._window = _Window(size_bytes)
        self._inbox = _Inbox(_Window(size_bytes))
        self._out: Lane | None = None
        self._connection: Connection | None = None
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = loop.create_future()
        self._beginning = loop.create_task(self._begin())
        # The task that writes the requests of a call whose caller gives them all at once.
        self.writing: asyncio.Future[None] | None = None
        self._timer = None if timeout_s is None else loop.call_later(timeout_s, self._overdue)
        channel.calls[self] = None

    # ---- its life ----

    async def _begin(self) -> None:
        outcome = await self._channel.connection()
        if self._status is not None:
            return
        if isinstance(outcome, Status) or outcome.is_broken:
            self._end(outcome if isinstance(outcome, Status) else _CUT)
            return
        network, path = self._channel.network, outcome.path
        self._connection = outcome
        is_shared = self._method.endswith("/Generate")
        self._out = Lane(network, path, Way.OUT, doubles=is_shared)
        back = Lane(network, path, Way.BACK, doubles=is_shared)
        back.deliver_to(self._arrived)
        cut = network.random.choice(_CUT_AMID_MESSAGES) if is_shared else _CUT
        outcome.on_break[self] = lambda: self._end(cut)
        windows = self._window, self._inbox.window
        outcome.listener.accept(outcome, self._method, self._out, back, *windows)
        self._out.send(_Begin())
        self._begun.set_result(None)

    def _arrived(self, frame: object) -> None:
        if self._status is not None:
            return
        if isinstance(frame, Status):
            self._end(frame)
        else:
            self._inbox.put(frame)

    def _end(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.on_break.pop(self, None)
        self._channel.calls.pop(self, None)
        self._window.open()
        self._inbox.end()
        if not self._begun.done():
            self._begun.set_result(None)

    def _leave(self, status: Status) -> None:
        if self._status is None:
            if self._out is not None:
                self._out.send(_Cancel())
            self._end(status)

    def _overdue(self) -> None:
        self._leave(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def cancel(self) -> bool:
        was_done = self.done()
        self._leave(Status(grpc.StatusCode.CANCELLED, "Locally cancelled", is_local=True))
        return not was_done

    def done(self) -> bool:
        return self._status is not None

    def _raise_status(self) -> None:
        assert self._status is not None
        if self._status.code is not grpc.StatusCode.OK:
            raise self._status.error()

    # ---- what its caller does ----

    async def write(self, message: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        try:
            await self._begun
            if not self.done():
                await self._window.wait_for_room()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.done():
            self._raise_status()
            raise asyncio.InvalidStateError("RPC already finished.")
        assert self._out is not None
        data = self._serializer(message)
        self._window.sent(data)
        self._out.send_message(_Message(data), _Message(data, is_copy=True))

    async def done_writing(self) -> None:
        await self._begun
        if self._out is not None and not self.done():
            self._out.send(_HalfClose())

    async def read(self) -> Any:
        try:
            data = await self._inbox.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if data is not None:
            return self._deserializer(data)
        self._raise_status()
        return _EOF

    def __aiter__(self) -> _Call:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is _EOF:
            raise StopAsyncIteration
        return message

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        answer = await self.read()
        while await self.read() is not _EOF:
            raise AssertionError("a unary call has two answers")
        return answer


class MemoryChannel:
    """Connects when a call needs it, and again after a back-off."""

    def __init__(self, network: Network, address: str) -> None:
        self.network = network
        self._address = address
        self._connection: Connection | None = None
        self._connecting: asyncio.Future[Connection | Status] | None = None
        self._back_off_s = _FIRST_BACK_OFF_S
        self._retry_at_s = 0.0
        self._failure = _CUT
        self._is_closed = False
        self.calls: dict[_Call, None] = {}

    def get_state(self) -> grpc.ChannelConnectivity:
        if self._connection is not None and not self._connection.is_broken:
            return grpc.ChannelConnectivity.READY
        return grpc.ChannelConnectivity.IDLE

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        for call in list(self.calls):
            call.cancel()
        if self._connection is not None:
            self._connection.break_off()

    async def connection(self) -> Connection | Status:
        """The connection for a call, or the status that it fails with."""
        if self._connection is not None and not self._connection.is_broken:
            return self._connection
        if self._connecting is None:
            if self.network.loop.time() < self._retry_at_s:
                return self._failure
            self._connecting = asyncio.ensure_future(self._connect())
            self._connecting.add_done_callback(self._connected)
        return await asyncio.shield(self._connecting)

    def _connected(self, done: asyncio.Future[Connection | Status]) -> None:
        self._connecting = None

    async def _connect(self) -> Connection | Status:
        network, path = self.network, self.network.path(self._address)
        await asyncio.sleep(path.delay_s)
        ends_s = network.loop.time() + CONNECT_S
        connection = None if path.closed else network.connect(self._address)
        if connection is None and not path.closed:
            return self._failed(Status(grpc.StatusCode.UNAVAILABLE, _REFUSED))
        # A host that is away, or stands still, shakes no hands.
        while connection is None or path.closed or connection.listener.process.is_stopped:
            if network.loop.time() >= ends_s:
                if connection is not None:
                    connection.break_off()
                return self._failed(Status(grpc.StatusCode.UNAVAILABLE, _TIMED_OUT))
            await asyncio.sleep(0.1)
            if connection is None and not path.closed:
                connection = network.connect(self._address)
        if connection.is_broken:
            return self._failed(_CUT)
        self._connection, self._back_off_s = connection, _FIRST_BACK_OFF_S
        return connection

    def _failed(self, status: Status) -> Status:
        self._failure = status
        self._retry_at_s = self.network.loop.time() + self._back_off_s
        self._back_off_s = min(2 * self._back_off_s, _MAX_BACK_OFF_S)
        return status

    # ---- what stubs ask for ----

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., _Call]:
        def begin(*, metadata: Any = None, timeout: float | None = None) -> _Call:
            return self._call(method, request_serializer, response_deserializer, timeout)

        return begin

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., _Call]:
        def begin(request: Any, *, metadata: Any = None, timeout: float | None = None) -> _Call:
            call = self._call(method, request_serializer, response_deserializer, timeout)
            call.writing = asyncio.ensure_future(_write_all(call, [request]))
            return call

        return begin

    unary_unary = unary_stream

    def stream_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., _Call]:
        def begin(
            requests: Iterable[Any], *, metadata: Any = None, timeout: float | None = None
        ) -> _Call:
            call = self._call(method, request_serializer, response_deserializer, timeout)
            call.writing = asyncio.ensure_future(_write_all(call, requests))
            return call

        return begin

    def _call(
        self, method: str, serializer: Any, deserializer: Any, timeout_s: float | None
    ) -> _Call:
        if self._is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        return _Call(self, method, serializer, deserializer, timeout_s)


async def _write_all(call: _Call, requests: Iterable[Any]) -> None:
    try:
        for request in requests:
            await call.write(request)
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
        # The reader learns of the same end.
        return


class MemoryConnector(Connector):
    """Opens channels in memory."""

    def __init__(self, network: Network) -> None:
        super().__init__(None)
        self._network = network

    def open_aio(self, address: str, credentials: object) -> Any:
        return MemoryChannel(self._network, address)


# ---- the server's end ---------------------------------------------------------------------------


class _Aborted(Exception):
    """A handler ended its call with a status."""


class _Context:
    """The call as its handler sees it."""

    def __init__(self) -> None:
        self.status: Status | None = None

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[Any] = ()
    ) -> None:
        self.status = Status(code, details, tuple(trailing_metadata))
        raise _Aborted

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class MemoryServer:
    """Runs the handlers of a servicer for calls that arrive."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._handlers: dict[str, Any] = {}
        self.listener = Listener(process, self._accept)

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Do nothing: the registered handlers, which come next, are the same ones."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def _accept(
        self,
        connection: Connection,
        method: str,
        requests: Lane,
        responses: Lane,
        requests_window: _Window,
        responses_window: _Window,
    ) -> None:
        """A call will begin with its first frame."""
        inbox = _Inbox(requests_window)
        handling: list[asyncio.Task[None]] = []

        def leave() -> None:
            connection.on_break.pop(inbox, None)
            requests.end()
            inbox.end()
            responses_window.open()
            for task in handling:
                self._process.call_soon(task.cancel)

        def arrived(frame: object) -> None:
            if isinstance(frame, _Cancel):
                leave()
            elif isinstance(frame, _Begin):
                work = self._handle(self._handlers[method], inbox, responses, responses_window)
                handling.append(self._process.run(work))
                handling[0].add_done_callback(lambda _: connection.on_break.pop(inbox, None))
            else:
                inbox.put(frame)

        connection.on_break[inbox] = leave
        requests.deliver_to(arrived)

    async def _handle(self, handler: Any, inbox: _Inbox, responses: Lane, window: _Window) -> None:
        context = _Context()
        try:
            await self._run(handler, inbox, responses, window, context)
            status = context.status or _OK
        except _Aborted:
            status = context.status or _OK
        except asyncio.CancelledError:
            return
        except Exception as error:  # noqa: BLE001 - as gRPC does
            text = f"Unexpected {type(error)}: {error}"
            status = Status(grpc.StatusCode.UNKNOWN, text)
        responses.send(status)

    async def _run(
        self, handler: Any, inbox: _Inbox, responses: Lane, window: _Window, context: _Context
    ) -> None:
        async def send(message: Any) -> None:
            await window.wait_for_room()
            data = handler.response_serializer(message)
            window.sent(data)
            responses.send_message(_Message(data), _Message(data, is_copy=True))

        if handler.request_streaming and not handler.response_streaming:
            await send(await handler.stream_unary(_messages(handler, inbox), context))
            return
        if handler.request_streaming:
            answers = handler.stream_stream(_messages(handler, inbox), context)
        else:
            data = await inbox.get()
            if data is None:
                return
            request = handler.request_deserializer(data)
            if not handler.response_streaming:
                await send(await handler.unary_unary(request, context))
                return
            answers = handler.unary_stream(request, context)
        async for answer in answers:
            await send(answer)


async def _messages(handler: Any, inbox: _Inbox) -> AsyncIterator[Any]:
    while (data := await inbox.get()) is not None:
        yield handler.request_deserializer(data)
