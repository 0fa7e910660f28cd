"""Puts of images: what streams leave behind that end meanwhile."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_client.fleet.placement.image_puts import ImagePuts
from penstock_proto.errors import PenstockError, ShardUnavailable
from penstock_proto.types import PromptImage

_IMAGE = PromptImage("ab" * 32, 1, 1, 0, 1)


class _Stream:
    request = SimpleNamespace(images=[_IMAGE])

    async def pixels(self, image: PromptImage) -> bytes:
        return b"rgb"


class _Client:
    """Ends its puts when it is told to, in an error or not."""

    def __init__(self, error: PenstockError | None) -> None:
        self.goes_on = asyncio.Event()
        self.num_puts = 0
        self._error = error

    async def put_image(self, image: PromptImage, pixels: bytes, *, instance_id: str) -> None:
        self.num_puts += 1
        await self.goes_on.wait()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("fails", [False, True])
async def test_a_put_that_no_stream_waits_for_any_more_ends_in_silence(fails: bool) -> None:
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    client = _Client(ShardUnavailable("gone") if fails else None)
    shard: Any = SimpleNamespace(info=SimpleNamespace(instance_id="e"), client=client)
    puts = ImagePuts(told.append, lambda *failed: told.append(failed))
    streams: list[Any] = [_Stream(), _Stream()]
    assert all(puts.hold(stream, shard) for stream in streams)
    while not client.num_puts:
        await asyncio.sleep(0)
    for stream in streams:
        puts.discard(stream)
    client.goes_on.set()
    while puts._putting:
        await asyncio.sleep(0)
    gc.collect()
    assert told == []
    assert not puts._waiting
    assert not puts._targets
    assert client.num_puts == 1
    # Whoever comes next has it put again only where that failed.
    assert puts.hold(streams[0], shard) == fails
    puts.close()
