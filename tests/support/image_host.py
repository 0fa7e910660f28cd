"""A host of images on loopback that answers as it is told, and a resolver whose names lead where a
test says. What connections are tried is noted; one that leaves loopback fails the test instead.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from support.image_files import picture, saved

IMAGE = saved(picture(), "PNG")
# What a host sends, in pieces; numbers are pauses in seconds.
Script = Sequence[bytes | float]


def answer(body: bytes = IMAGE, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers]
    if not any(line.lower().startswith(("content-length", "transfer")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(to: str, status: str = "302 Found") -> bytes:
    return answer(b"elsewhere", f"Location: {to}", status=status)


class ImageHost:
    """Answers each request for a path with its script, and then closes the connection."""

    def __init__(self) -> None:
        self.port = 0
        self.scripts: dict[str, Script] = {}
        # Heads of requests.
        self.heads: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            for step in self.scripts.get(head.split()[1], [answer(b"", status="404 Not Found")]):
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    writer.write(step)
                    await writer.drain()
        writer.close()


@asynccontextmanager
async def image_host(tls: ssl.SSLContext | None = None) -> AsyncIterator[ImageHost]:
    host = ImageHost()
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(asyncio.CancelledError):
            await host(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class StubResolver(AbstractResolver):
    """Knows these names alone. Of several lists of addresses, each look-up takes the next."""

    def __init__(self) -> None:
        self.names: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        lists = self.names.get(host)
        if not lists:
            raise OSError(None, "no such name")
        found = lists.pop(0) if len(lists) > 1 else lists[0]
        return [
            ResolveResult(
                hostname=host,
                host=each,
                port=port,
                family=socket.AF_INET6 if ":" in each else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for each in found
        ]

    async def close(self) -> None:
        pass


def note_connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses to which the running event loop tries to connect: those of loopback alone are
    connected to.
    """
    loop = asyncio.get_running_loop()
    tried: list[str] = []
    connect = loop.sock_connect

    async def note(sock: socket.socket, address: Any) -> None:
        tried.append(address[0])
        if not ipaddress.ip_address(address[0]).is_loopback:
            raise OSError("a test must not leave this machine")
        await connect(sock, address)

    monkeypatch.setattr(loop, "sock_connect", note)
    return tried
