"""Connections over real sockets: how many there may be, and how long headers may take."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from aiohttp import web
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.test_utils import make_mocked_request
from support.certificates import Authority

from penstock_router.admission.shared_budget import MEMORY_BYTES, SharedBudget
from penstock_router.server import connections
from penstock_router.server.connections import (
    _HANDSHAKES_A_CLIENT,
    Connection,
    ConnectionFactory,
    Runner,
    _allowed,
    end_answer,
)

REQUEST = b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _quick(request: web.Request) -> web.Response:
    return web.Response(text="done")


async def _unread(request: web.Request) -> web.Response:
    return web.Response(status=405, text="only GET")


async def _slow(request: web.Request) -> web.Response:
    await asyncio.sleep(0.3)
    return web.Response(text="slow")


async def _early(request: web.Request) -> web.StreamResponse:
    """Answers, and has something left to do."""
    length = len(await request.read())
    response = web.Response(text=str(length))
    await response.prepare(request)
    await end_answer(request, response)
    await asyncio.sleep(0.3)
    return response


async def _read(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))


@asynccontextmanager
async def _served(
    *,
    max_connections: int = 100,
    timeout_s: float = 0.15,
    tls: ssl.SSLContext | None = None,
    memory: SharedBudget | None = None,
) -> AsyncIterator[int]:
    """The port of a server with such bounds."""
    app = web.Application()
    app.add_routes(
        [
            web.get("/quick", _quick),
            web.post("/quick", _unread),
            web.get("/slow", _slow),
            web.post("/read", _read),
            web.post("/early", _early),
        ]
    )
    runner = Runner(
        app,
        max_connections=max_connections,
        header_timeout_s=timeout_s,
        write_timeout_s=10.0,
        memory=memory or SharedBudget(MEMORY_BYTES),
        error_response=lambda reason: web.Response(status=400, text=reason),
    )
    await runner.setup()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    try:
        async with runner.listening(listener, tls):
            yield listener.getsockname()[1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _connected(
    port: int, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1"
) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, local_addr=(address, 0)
    )
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _answer(client: Client, request: bytes = REQUEST) -> bytes:
    reader, writer = client
    writer.write(request)
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head + await reader.readexactly(length)


async def _is_closed(client: Client, within_s: float = 10) -> bool:
    try:
        async with asyncio.timeout(within_s):
            return await client[0].read() == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX-A: b\r\n"])
async def test_who_does_not_send_its_headers_in_time_is_cut_off(sent: bytes) -> None:
    async with _served() as port, _connected(port) as client:
        client[1].write(sent)
        assert await _is_closed(client)


async def test_a_byte_now_and_then_does_not_help() -> None:
    async with _served() as port, _connected(port) as client:
        reading = asyncio.create_task(_is_closed(client))
        for byte in REQUEST[:-1] * 10:
            if reading.done():
                break
            client[1].write(bytes([byte]))
            await asyncio.sleep(0.01)
        assert reading.done()
        assert await reading


async def test_who_was_answered_may_be_idle_for_longer_and_ask_again() -> None:
    async with _served() as port, _connected(port) as client:
        assert (await _answer(client)).endswith(b"done")
        assert not await _is_closed(client, within_s=0.3)
        assert (await _answer(client)).endswith(b"done")


async def test_the_next_requests_headers_have_the_same_time() -> None:
    async with _served() as port, _connected(port) as client:
        await _answer(client)
        client[1].write(REQUEST[:10])
        assert await _is_closed(client)


async def test_neither_a_slow_answer_nor_a_slow_body_counts() -> None:
    async with _served() as port:
        async with _connected(port) as client:
            slow = REQUEST.replace(b"quick", b"slow")
            assert (await _answer(client, slow)).endswith(b"slow")
        async with _connected(port) as client:
            client[1].write(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
            for _ in range(3):
                await asyncio.sleep(0.1)
                client[1].write(b"x")
            assert (await _answer(client, b"x")).endswith(b"4")
            assert (await _answer(client)).endswith(b"done")


@pytest.mark.parametrize("with_tls", [False, True])
def test_it_is_the_same_on_the_loop_that_serves(with_tls: bool, tmp_path: Path) -> None:
    here = there = None
    if with_tls:
        authority = Authority(tmp_path, "own")
        pair = authority.issue("127.0.0.1")
        here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        here.load_cert_chain(pair.cert, pair.key)
        there = ssl.create_default_context(cafile=str(authority.file))

    async def ask_and_leave_off() -> None:
        async with _served(tls=here) as port, _connected(port, there) as client:
            slow = REQUEST.replace(b"quick", b"slow")
            assert (await _answer(client, slow)).endswith(b"slow")
            assert not await _is_closed(client, within_s=0.3)
            client[1].write(REQUEST[:10])
            assert await _is_closed(client)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask_and_leave_off())


async def test_requests_that_come_one_behind_the_other_are_all_answered() -> None:
    async with _served() as port, _connected(port) as client:
        slow = REQUEST.replace(b"quick", b"slow")
        assert (await _answer(client, slow + REQUEST)).endswith(b"slow")
        assert (await _answer(client, b"")).endswith(b"done")


async def test_beyond_so_many_connections_there_is_503_until_one_ends() -> None:
    async with _served(max_connections=4, timeout_s=30) as port:
        async with _connected(port) as first, _connected(port) as second:
            for client in (first, second):
                assert (await _answer(client)).endswith(b"done")
            async with _connected(port) as third:
                answer = await _answer(third, b"")
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"Retry-After: 1" in answer
                assert await _is_closed(third)
            assert (await _answer(first)).endswith(b"done")
        await _is_served_again(port)


async def _is_served_again(port: int, tls: ssl.SSLContext | None = None) -> None:
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                async with _connected(port, tls) as client:
                    if (await _answer(client)).endswith(b"done"):
                        return
            await asyncio.sleep(0.01)


class FromAddress(asyncio.Transport):
    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1)})
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


async def test_one_address_leaves_connections_to_others() -> None:
    server = web.Server(_quick)  # type: ignore[arg-type]
    door = ConnectionFactory(
        server, 8, 30, 60, SharedBudget(MEMORY_BYTES), lambda reason: web.Response()
    )

    def connect(address: str) -> Connection | None:
        connection, transport = door(), FromAddress(address)
        connection.connection_made(transport)
        return None if transport.written else connection

    there = [connect("10.0.0.1") for _ in range(8)]
    assert [one is not None for one in there] == [True] * 4 + [False] * 4
    # Of IPv6, all addresses of one network are one client.
    others = [connect(f"2001:db8::{number}") for number in range(8)]
    assert sum(one is not None for one in others) == 2
    late = connect("10.0.0.2")
    assert late is not None
    for one in (*there, *others, late):
        if one is not None:
            one.connection_lost(None)
    assert door.connections.held == 0
    await asyncio.sleep(0)


async def test_unfinished_headers_of_one_address_leave_memory_to_others() -> None:
    memory = SharedBudget(1_000_000)
    server = web.Server(_quick)  # type: ignore[arg-type]
    door = ConnectionFactory(server, 100, 30, 60, memory, lambda reason: web.Response())
    head = REQUEST[:-2] + b"".join(b"X-%d: %b\r\n" % (number, b"a" * 8000) for number in range(9))
    open_ones = []
    for _ in range(20):
        connection = door()
        connection.connection_made(FromAddress("10.0.0.1"))
        connection.data_received(head)
        if connection.connected:
            open_ones.append(connection)
    assert len(open_ones) == 6
    assert memory.held == 6 * len(head)
    # A request whose headers are complete holds its memory elsewhere.
    headers = dict(line.split(": ") for line in head.decode().splitlines()[1:])
    open_ones[0].request_begins(
        make_mocked_request("GET", "/quick", headers, payload=EMPTY_PAYLOAD)
    )
    assert memory.held == 5 * len(head)
    for connection in open_ones:
        connection.connection_lost(None)
    assert memory.held == 0
    await asyncio.sleep(0)


LOOPS = pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop])


@LOOPS
def test_handshakes_count_and_end_with_the_timeout_of_headers(
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None, tmp_path: Path
) -> None:
    pair = (authority := Authority(tmp_path, "own")).issue("127.0.0.1")
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_cert_chain(pair.cert, pair.key)
    there = ssl.create_default_context(cafile=str(authority.file))

    async def open_many() -> None:
        async with (
            _served(max_connections=8, timeout_s=0.5, tls=here) as port,
            AsyncExitStack() as s,
        ):
            silent = [await s.enter_async_context(_connected(port)) for _ in range(4)]
            begun_s = time.monotonic()
            for garbage, client in zip(
                (b"", b"\x16", b"\x16\x03\x01\x02\x00"), silent, strict=False
            ):
                client[1].write(garbage)
            with pytest.raises(ConnectionError):
                async with _connected(port, there):
                    pass
            assert all(await asyncio.gather(*map(_is_closed, silent)))
            assert 0.25 < time.monotonic() - begun_s < 5
            await _is_served_again(port, there)
        async with _served(max_connections=4, timeout_s=30, tls=here) as port:
            for sent in (b"", REQUEST) * 4:
                async with _connected(port) as client:
                    client[1].write(sent)
                    if sent:
                        await client[0].read()
            await _is_served_again(port, there)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(open_many())


@LOOPS
def test_handshakes_of_one_client_wait_for_each_other_and_delay_no_others(
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None, tmp_path: Path
) -> None:
    pair = (authority := Authority(tmp_path, "own")).issue("127.0.0.1")
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_cert_chain(pair.cert, pair.key)
    there = ssl.create_default_context(cafile=str(authority.file))

    async def ask(port: int, address: str) -> bytes:
        async with _connected(port, there, address) as client:
            return await _answer(client)

    async def hold_turns() -> None:
        async with _served(timeout_s=30, tls=here) as port, AsyncExitStack() as open_ones:
            silent = [
                await open_ones.enter_async_context(_connected(port, None, "127.0.0.2"))
                for _ in range(_HANDSHAKES_A_CLIENT)
            ]
            asking = asyncio.create_task(ask(port, "127.0.0.2"))
            for _ in range(10):
                assert (await ask(port, "127.0.0.1")).endswith(b"done")
            assert not asking.done()
            silent[0][1].transport.abort()
            assert (await asking).endswith(b"done")

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(hold_turns())


@LOOPS
def test_many_handshakes_at_once_begin_one_in_a_turn_of_the_loop(
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pair = Authority(tmp_path, "own").issue("127.0.0.1")
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_cert_chain(pair.cert, pair.key)
    turn = 0
    begun_in: list[int] = []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def fail(_: object, accepted: socket.socket, **__: object) -> None:
        begun_in.append(turn)
        accepted.close()
        raise ConnectionError

    async def connect_at_once() -> None:
        async with _served(timeout_s=30, tls=here) as port, AsyncExitStack() as open_ones:
            monkeypatch.setattr(asyncio.get_running_loop(), "connect_accepted_socket", fail)
            counting = asyncio.create_task(count_turns())
            for _ in range(_HANDSHAKES_A_CLIENT):
                # The system accepts them, before the server gets a turn.
                client = open_ones.enter_context(socket.socket())
                client.connect(("127.0.0.1", port))
            async with asyncio.timeout(10):
                while len(begun_in) < _HANDSHAKES_A_CLIENT:
                    await asyncio.sleep(0)
            counting.cancel()
        assert len(set(begun_in)) == _HANDSHAKES_A_CLIENT

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(connect_at_once())


# ---- What comes behind a request ---------------------------------------------------------------

SLOW = REQUEST.replace(b"quick", b"slow")
WITH_BODY = b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
CHUNKED = b"POST /read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
FIELD = b"X-A: " + b"a" * 8000 + b"\r\n"


@pytest.mark.parametrize("request_", [SLOW, WITH_BODY, CHUNKED + b"4\r\nbody\r\n0\r\n\r\n"])
@pytest.mark.parametrize("with_request", [True, False])
async def test_headers_that_began_behind_a_request_have_the_same_time(
    request_: bytes, with_request: bool
) -> None:
    head = REQUEST[:-2] + FIELD
    async with _served() as port, _connected(port) as client:
        if with_request:
            await _answer(client, request_ + head)
        else:
            client[1].write(request_)
            await asyncio.sleep(0)
            await _answer(client, head)
        assert await _is_closed(client, within_s=3)


async def test_headers_that_come_while_another_request_is_answered_count_as_memory() -> None:
    memory = SharedBudget(MEMORY_BYTES)
    async with _served(memory=memory, timeout_s=30) as port, _connected(port) as client:
        client[1].write(SLOW)
        await client[1].drain()
        client[1].write(REQUEST[:-2] + FIELD)
        async with asyncio.timeout(10):
            while memory.held < len(FIELD):
                await asyncio.sleep(0.01)
        assert (await _answer(client, b"")).endswith(b"slow")
        assert len(FIELD) < memory.held <= len(REQUEST + FIELD)
        assert (await _answer(client, b"\r\n")).endswith(b"done")
        assert memory.held == 0


@pytest.mark.parametrize(
    "head", [SLOW, CHUNKED + b"4\r\nbody\r\n0\r\n", CHUNKED + b"4\r\nbody\r\n4;"]
)
async def test_who_sends_much_besides_the_body_of_a_request_is_cut_off(head: bytes) -> None:
    async with _served(timeout_s=30) as port, _connected(port) as client:
        client[1].write(head)
        if head == SLOW:
            client[1].write(REQUEST[:-2])
        for _ in range(3):
            await asyncio.sleep(0.05)
            client[1].write(FIELD)
        assert await _is_closed(client, within_s=0.3)


async def test_a_long_request_may_follow_an_answer_whose_handler_has_not_ended() -> None:
    memory = SharedBudget(MEMORY_BYTES)
    head = WITH_BODY.replace(b"read", b"early").partition(b"h: 4")[0]
    body = b"x" * 1_000_000
    async with _served(memory=memory, timeout_s=30) as port, _connected(port) as client:
        for _ in range(3):
            answer = await _answer(client, head + b"h: 1000000\r\n\r\n" + body)
            assert answer.endswith(b"1000000")
        assert memory.held == 0


async def test_a_body_of_small_chunks_may_be_long_and_have_a_trailer() -> None:
    memory = SharedBudget(MEMORY_BYTES)
    async with _served(memory=memory) as port, _connected(port) as client:
        for _ in range(2):
            client[1].write(CHUNKED + b"1\r\nx\r\n" * 100_000)
            answer = await _answer(client, b"0\r\n" + FIELD + b"\r\n")
            assert answer.endswith(b"100000")
            assert memory.held == 0
        assert not await _is_closed(client, within_s=0.3)
        long = WITH_BODY.replace(b"h: 4", b"h: 1000000").replace(b"body", b"x" * 1_000_000)
        for _ in range(2):
            assert (await _answer(client, long)).endswith(b"1000000")
            assert memory.held == 0
        assert not await _is_closed(client, within_s=0.3)


# ---- Bodies that nobody reads ------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("with_tls", [False, True])
def test_who_sends_a_body_that_nobody_reads_gets_the_answer_and_the_connection_is_closed(
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None,
    with_tls: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With TLS it waits until the client closes the connection.
    monkeypatch.setattr(connections, "_LINGER_S", 1.0)
    here = there = None
    if with_tls:
        pair = (authority := Authority(tmp_path, "own")).issue("127.0.0.1")
        here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        here.load_cert_chain(pair.cert, pair.key)
        there = ssl.create_default_context(cafile=str(authority.file))

    async def send_first_and_read_then() -> None:
        async with _served(tls=here) as port, _connected(port, there) as (reader, writer):
            length = 30_000_000
            head = f"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
            writer.write(head.encode())
            # A client that does not look for an answer before it has sent everything.
            for _ in range(length // 1_000_000):
                writer.write(b" " * 1_000_000)
                await writer.drain()
            answer = await _answer((reader, writer), b"")
            assert b"\r\nconnection: close\r\n" in answer.lower()
            assert answer.endswith(b"only GET")
            assert await _is_closed((reader, writer))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(send_first_and_read_then())


async def test_a_client_that_goes_on_sending_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_LINGER_S", 0.3)

    async def send_on(writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /quick HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        async with asyncio.timeout(10):
            while True:
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)

    async with _served() as port, _connected(port) as (_, writer):
        with pytest.raises(ConnectionError):
            await send_on(writer)


async def test_a_body_that_nobody_reads_but_is_here_leaves_the_connection_open() -> None:
    async with _served() as port, _connected(port) as client:
        head = b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        for _ in range(2):
            assert (await _answer(client, head)).endswith(b"only GET")


async def test_bytes_that_are_not_http_are_answered_by_the_application() -> None:
    async with _served() as port, _connected(port) as client:
        answer = await _answer(client, b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ") or answer.startswith(b"HTTP/1.0 400 ")
        assert answer.endswith(b"Duplicate 'Host' header found.")
        assert await _is_closed(client)


async def test_who_leaves_is_forgotten_also_before_it_was_answered() -> None:
    async with _served(max_connections=3, timeout_s=30) as port:
        for _ in range(20):
            for sent in (b"", b"nonsense\r\n\r\n", REQUEST[:7], REQUEST):
                async with _connected(port) as client:
                    client[1].write(sent)
                    await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        async with _connected(port) as client:
            assert (await _answer(client)).endswith(b"done")


@pytest.mark.parametrize(
    ("limits", "allowed", "raised_to"),
    [
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10_000, None),
        ((20_000, 20_000), 10_000, None),
        ((1024, resource.RLIM_INFINITY), 10_000, 10_512),
        ((1024, 1_000_000), 10_000, 10_512),
        ((1024, 4096), 3584, 4096),
        ((256, 256), 1, 256),
    ],
)
def test_there_are_as_many_as_the_system_allows_files(
    limits: tuple[int, int], allowed: int, raised_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: raised.append(pair[0]))
    assert _allowed(10_000) == allowed
    assert raised == ([] if raised_to is None else [raised_to])
