"""Requests that are over leave no cycles: nobody looks for cycles among old objects."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.router_doubles import MemoryRouter

from penstock_proto.errors import ShardFailed
from penstock_router.config import RouterConfig
from penstock_router.errors import BadRequest
from penstock_router.images.decoder_pool import DecoderPool
from penstock_router.images.image import ImageRefused
from penstock_router.images.line import Line
from penstock_router.offload.dispatch import LONG_BYTES, SHORT_BYTES
from penstock_router.thread_pool import Threads


def _garbage() -> Counter[str]:
    """Objects of ours that only the collector would find."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return Counter(
            type(each).__qualname__
            for each in gc.garbage
            if type(each).__module__.startswith("penstock")
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        # They were only shown: now they go, and are not found once more.
        gc.collect()


async def _all_kinds_of_requests(router: MemoryRouter) -> None:
    for stream in (False, True):
        await router.complete(max_tokens=5, stream=stream)
        await router.complete(max_tokens=5, stream=stream, n=3, logprobs=2)
        await router.chat(max_tokens=5, stream=stream, stop=["e"])
        await router.post("/v1/responses", {"input": "Hello", "stream": stream})
    await router.post("/tokenize", {"prompt": "Hello"})
    # Some that are refused: at once; for their text here, in a thread and in a text process.
    await router.complete(max_tokens=-1)
    unknown = {"allowed_token_ids": [1_000_000]}
    for length in (0, 2 * SHORT_BYTES, 2 * LONG_BYTES):
        await router.complete(max_tokens=1, user="x" * length, **unknown)
    # And one that fails in the middle.
    router.fleet.script = lambda request: [5, 6, ShardFailed("broken")]
    await router.complete(max_tokens=5)
    await router.complete(max_tokens=5, stream=True)


async def test_requests_leave_nothing_for_the_collector(router: MemoryRouter) -> None:
    await _all_kinds_of_requests(router)
    await asyncio.sleep(0.05)
    _garbage()
    gc.disable()
    try:
        script = router.fleet.script
        await _all_kinds_of_requests(router)
        router.fleet.script = script
        await asyncio.sleep(0.05)
        assert _garbage() == Counter()
    finally:
        gc.enable()


async def _refuse(client: str) -> bytes:
    await asyncio.sleep(0)
    raise BadRequest("no")


def _refuse_in_thread() -> bytes:
    raise BadRequest("no")


async def _in_threads() -> object:
    with ThreadPoolExecutor(1) as executor:
        return await Threads(executor, 1).run(_refuse_in_thread)


async def _in_line() -> object:
    return await Line(1, "served").do("a job", _refuse, "a client")


async def _in_a_decoder() -> object:
    decoders = DecoderPool(RouterConfig(shards="fake:1"))
    try:
        return await decoders.decode([b"no image"])
    finally:
        await decoders.close()


@pytest.mark.parametrize("work", [_in_threads, _in_line, _in_a_decoder])
async def test_a_refusal_leaves_nothing_for_the_collector(
    work: Callable[[], Awaitable[object]],
) -> None:
    for _ in range(2):
        _garbage()
        gc.disable()
        try:
            with pytest.raises((BadRequest, ImageRefused)):
                await work()
            await asyncio.sleep(0.05)
            left = _garbage()
        finally:
            gc.enable()
    # The first may have made what lives on.
    assert left == Counter()
