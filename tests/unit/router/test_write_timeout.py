"""Clients that do not take what they are sent: how long they have, and what they hold meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import uvloop
from aiohttp import web
from support.budget import in_soak
from support.certificates import Authority
from support.router_doubles import (
    Connection,
    FakeFleet,
    MemoryRouter,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

from penstock_router.admission.shared_budget import MEMORY_BYTES, SharedBudget
from penstock_router.errors import SlowClient
from penstock_router.server.connections import Runner
from penstock_router.server.parts import ROUTER
from penstock_router.server.send import LONG_ANSWER_BYTES, _divide, encoded_response
from penstock_router.server.write_timeout import WriteTimeout


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time a test sets."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


class Socket(asyncio.Transport):
    """A transport of which a client has not taken so much."""

    unsent_bytes = 0
    closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 1

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


def _survives(bytes_each_s: list[int], timeout_s: float = 60.0) -> bool:
    """True if a client that takes these bytes, second by second, keeps its connection."""
    loop, transport = Clock(), Socket()

    async def take() -> bool:
        transport.unsent_bytes = 10**9
        write_timeout = WriteTimeout(transport, timeout_s)
        write_timeout.pause()
        for num_bytes in bytes_each_s:
            transport.unsent_bytes -= num_bytes
            loop.now_s += 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if transport.closed:
                with pytest.raises(SlowClient):
                    await write_timeout.wait_sent()
                return False
        write_timeout.end()
        return True

    with contextlib.closing(loop):
        return loop.run_until_complete(take())


def test_a_client_that_reads_nothing_has_the_timeout_and_no_more() -> None:
    assert _survives([0] * 59)
    assert not _survives([0] * 61)


def test_a_client_that_reads_slowly_has_as_long_as_it_needs_and_a_trickle_buys_nothing() -> None:
    assert _survives([1100] * 3600)
    assert _survives([60_000, *[0] * 50] * 100)
    assert not _survives([1, *[0] * 9] * 10)
    assert not _survives([*[0] * 29, 1024] * 5)


def test_a_client_that_takes_each_byte_of_many_at_the_last_moment_is_cut_off() -> None:
    loop, transport = Clock(), Socket()

    async def take() -> float:
        write_timeout = WriteTimeout(transport, 60.0)
        while True:
            transport.unsent_bytes = 200
            write_timeout.pause()
            for _ in range(50):
                loop.now_s += 1
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if transport.closed:
                    return loop.now_s
            transport.unsent_bytes = 0
            write_timeout.resume()

    with contextlib.closing(loop):
        assert loop.run_until_complete(take()) < 70


async def test_waiting_for_a_client_who_left_ends() -> None:
    transport = Socket()
    write_timeout = WriteTimeout(transport, 60.0)
    write_timeout.pause()
    waiting = asyncio.create_task(write_timeout.wait_sent())
    await asyncio.sleep(0)
    transport.closed = True
    write_timeout.end()
    with pytest.raises(ConnectionResetError):
        await waiting


# ---- Real sockets ------------------------------------------------------------------------------


async def _whole(request: web.Request) -> web.Response:
    body = bytes(int(request.query["bytes"]))
    # In pieces, as `send` has them written.
    return web.Response(body=io.BytesIO(body) if len(body) > LONG_ANSWER_BYTES else body)


@asynccontextmanager
async def _served(
    tls: ssl.SSLContext | None = None, *, timeout_s: float = 0.4, send_bytes: int | None = 4096
) -> AsyncIterator[tuple[int, list[web.BaseRequest]]]:
    """The port of a server, and the requests that it is answering. `send_bytes` is what the system
    takes of what is sent to a client; None: as it is in a router.
    """
    running: list[web.BaseRequest] = []

    @web.middleware
    async def note(request: web.Request, handler: object) -> web.StreamResponse:
        running.append(request)
        try:
            response = await _whole(request)
            await response.prepare(request)
            await response.write_eof()
            return response
        finally:
            running.remove(request)

    app = web.Application(middlewares=[note])
    runner = Runner(
        app,
        max_connections=10,
        header_timeout_s=60.0,
        write_timeout_s=timeout_s,
        memory=SharedBudget(MEMORY_BYTES),
        error_response=lambda reason: web.Response(status=400, text=reason),
        handler_cancellation=True,
    )
    await runner.setup()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    try:
        async with runner.listening(listener, tls):
            if send_bytes is not None:
                # Little is in flight, so that short answers do not fit either.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
            yield listener.getsockname()[1], running
    finally:
        await runner.cleanup()


async def _unread(num_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    async with _served() as (port, running):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(
                client, b"GET /?bytes=%d HTTP/1.1\r\nHost: x\r\n\r\n" % num_bytes
            )
            await _until(lambda: running)
            await _until(lambda: not running)
            received = 0
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(10):
                    while data := await loop.sock_recv(client, 65536):
                        received += len(data)
            assert received < num_bytes


@pytest.mark.parametrize("num_bytes", [60_000, 30_000_000])
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_answer_that_is_not_streamed_and_not_read_is_cut_off_too(
    num_bytes: int, loop_factory: object
) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:  # type: ignore[arg-type]
        runner.run(_unread(num_bytes))


async def _slowly_read() -> None:
    loop = asyncio.get_running_loop()
    num_bytes, each_bytes, each_s = 6_000_000, 16_384, 0.05
    async with _served(timeout_s=0.8, send_bytes=None) as (port, running):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(
                client, b"GET /?bytes=%d HTTP/1.1\r\nHost: x\r\n\r\n" % num_bytes
            )
            await _until(lambda: running)
            received, begun_s = 0, loop.time()
            # Four timeouts.
            while loop.time() - begun_s < 3.2:
                data = await loop.sock_recv(client, each_bytes)
                assert data
                received += len(data)
                assert running
                await asyncio.sleep(each_s)
            # It is not sent yet: the system took little at once.
            assert received < num_bytes / 2


@pytest.mark.parametrize(
    "loop_factory",
    [in_soak(asyncio.new_event_loop), uvloop.new_event_loop],
)
def test_who_reads_a_long_answer_slowly_is_not_cut_off(loop_factory: object) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:  # type: ignore[arg-type]
        runner.run(_slowly_read())


async def _both_ends_over_tls(here: ssl.SSLContext, there: ssl.SSLContext) -> None:
    loop = asyncio.get_running_loop()
    wrong: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    async with _served(here) as (port, running):
        for num_bytes in (10, 500_000, 10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=there)
            writer.write(b"GET /?bytes=%d HTTP/1.1\r\nHost: x\r\n\r\n" % num_bytes)
            async with asyncio.timeout(10):
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(num_bytes)
            writer.close()
            await writer.wait_closed()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=there)
        writer.write(b"GET /?bytes=30000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        await _until(lambda: running)
        cast(asyncio.Transport, writer.transport).pause_reading()
        await _until(lambda: not running)
        writer.transport.abort()
    assert wrong == []


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_is_the_same_over_tls(loop_factory: object, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "own")
    signed = authority.issue("127.0.0.1")
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_cert_chain(signed.cert, signed.key)
    there = ssl.create_default_context(cafile=str(authority.file))
    with asyncio.Runner(loop_factory=loop_factory) as runner:  # type: ignore[arg-type]
        runner.run(_both_ends_over_tls(here, there))


# ---- What an unread answer holds ---------------------------------------------------------------


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def _ask(router: MemoryRouter, path: str, body: dict[str, object]) -> Connection:
    """A request whose answer is not read."""
    connection = router.connect()
    connection.stop_reading()
    data = json.dumps(body).encode()
    connection.send("POST", path, data, {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 5}),
        ("/v1/embeddings", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
    ],
)
async def test_an_answer_keeps_its_place_until_it_is_sent(
    byte_level: Tokenizer, path: str, body: dict[str, object]
) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet, max_concurrent_requests=1, max_queued_requests=0) as router:
        admission = router.app[ROUTER].admission
        connection = _ask(router, path, body)
        await _until(lambda: b"200 OK" in connection.reader._buffer)  # type: ignore[attr-defined]
        assert admission.num_keys == 1
        assert (await router.complete(max_tokens=1)).status == 429
        connection.go_on_reading()
        assert (await connection.read_answer()).status == 200
        await _until(lambda: not admission.num_keys)
        connection.close()


async def test_who_does_not_read_an_answer_gives_its_place_back_in_time(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet, write_timeout_s=0.1) as router:
        connection = _ask(router, "/v1/completions", {"prompt": "x", "max_tokens": 5})
        await _until(lambda: router.app[ROUTER].admission.in_flight)
        await _until(lambda: connection.transport.closed)
        await _until(lambda: not router.app[ROUTER].admission.num_keys)


async def test_unread_answers_count_as_memory_of_their_client_and_what_does_not_fit_is_429(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet) as router:
        memory = router.app[ROUTER].memory
        # Some 200 kB each, and two megabytes while one is made.
        memory.total = 7_000_000
        long = {"prompt": "x", "max_tokens": 500, "logprobs": 5, "n": 4}
        connections: list[Connection] = []

        async def ask() -> int:
            """The status of one more answer that is not read."""
            connections.append(_ask(router, "/v1/completions", long))
            status, _ = await connections[-1].read_head()
            return status

        while (status := await ask()) == 200:
            assert len(connections) < 20
        assert status == 429
        assert len(connections) > 2
        assert memory.held_by("") == memory.held
        refused = connections.pop()
        assert b"read the answers before it" in await refused.reader.readuntil(b"}}")
        refused.close()
        # Another client has room, and short answers fit whatever is held.
        assert memory.allows("another", 100_000)
        assert (await router.complete(max_tokens=1)).status == 200
        for connection in connections:
            connection.go_on_reading()
        await _until(lambda: not memory.held)
        for connection in connections:
            connection.close()


def test_a_long_answer_is_not_copied_before_it_is_sent() -> None:
    response = encoded_response(b"[" + b" " * 10_000_000 + b"]")
    tracemalloc.start()
    _divide(response)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.headers["Content-Type"] == "application/json"
    assert peak_bytes < 1_000_000


async def test_files_metrics_and_stored_responses_count_too(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet) as router:
        memory = router.app[ROUTER].memory
        connection = router.connect()
        connection.stop_reading()
        connection.send("GET", "/openapi.json", b"", {})
        await _until(lambda: memory.held > LONG_ANSWER_BYTES)
        connection.go_on_reading()
        await _until(lambda: not memory.held)
        connection.close()


async def test_log_probabilities_count_while_an_answer_is_made_of_them(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet) as router:
        memory = router.app[ROUTER].memory
        memory.total = 1_500_000
        prompt = {"prompt": [5] * 500, "max_tokens": 1, "prompt_logprobs": 5}
        output = {"prompt": "x", "max_tokens": 500, "logprobs": 5, "ignore_eos": True}
        with memory.hold("") as besides:
            besides.add(100)
            for body in (prompt, output):
                answer = await router.post("/v1/completions", body)
                assert answer.status == 200
                assert memory.held == besides.amount
            besides.add(700_000)
            # What is known before is refused before a shard is asked.
            for body, asked in ((prompt, 0), (output, 1)):
                before = len(fleet.requests)
                answer = await router.post("/v1/completions", body)
                assert answer.status == 429
                assert "read the answers before it" in answer.error["message"]
                assert len(fleet.requests) == before + asked
                assert memory.held == besides.amount
