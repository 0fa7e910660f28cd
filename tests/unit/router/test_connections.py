"""Connections over real sockets: how many there may be, and how long headers may take."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from aiohttp import web
from support.certificates import Authority

from penstock_router.connections import Runner, _allowed

REQUEST = b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _quick(request: web.Request) -> web.Response:
    return web.Response(text="done")


async def _slow(request: web.Request) -> web.Response:
    await asyncio.sleep(0.5)
    return web.Response(text="slow")


async def _read(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))


@asynccontextmanager
async def _served(
    *, max_connections: int = 100, timeout_s: float = 0.15, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """The port of a server with such bounds."""
    app = web.Application()
    app.add_routes([web.get("/quick", _quick), web.get("/slow", _slow), web.post("/read", _read)])
    runner = Runner(
        app,
        max_connections=max_connections,
        header_timeout_s=timeout_s,
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
async def _connected(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
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
        assert not await _is_closed(client, within_s=0.5)
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
    async with _served(max_connections=2, timeout_s=30) as port:
        async with _connected(port) as first, _connected(port) as second:
            await _answer(first)
            await _answer(second)
            async with _connected(port) as third:
                answer = await _answer(third, b"")
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"Retry-After: 1" in answer
                assert await _is_closed(third)
            assert (await _answer(first)).endswith(b"done")
        async with asyncio.timeout(10):
            while True:
                async with _connected(port) as client:
                    if (await _answer(client)).endswith(b"done"):
                        break
                await asyncio.sleep(0.01)


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
