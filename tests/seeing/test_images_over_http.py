"""Images over HTTP while engines die, clients leave and hostile images come."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from PIL import Image
from seeing.conftest import IMAGE_BYTES, SIDE
from support.budget import budget, seeded
from support.hostile_images import REFUSED
from support.image_files import picture, saved
from support.image_site import ImageSite, SeeingShards, data_url, image_site
from support.processes import Shard

from penstock_client import Fleet
from penstock_router.app import build_app, error_of_http
from penstock_router.config import RouterConfig
from penstock_router.observe.metrics import Metrics
from penstock_router.server.connections import Runner
from penstock_router.server.parts import ROUTER
from penstock_router.store.response_store import store_file

_PATH = "/v1/chat/completions"
_NUM_TOKENS = 60
# Of /health, while a machine of two cores is kept busy.
_MOST_HEALTH_MS = 20


@pytest.fixture(scope="module")
def site(shards: SeeingShards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageSite]:
    with image_site(tmp_path_factory.mktemp("site"), shards) as made:
        yield made


def _asked(site: ImageSite, *files: bytes, **more: Any) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    content = [*images, {"type": "text", "text": "what is this"}]
    return {
        **{"model": site.name, "messages": [{"role": "user", "content": content}]},
        **{"max_tokens": _NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more},
    }


async def _settled(site: ImageSite) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(lambda: all(each.healthy() for each in site.shards)):
            await asyncio.sleep(0.05)
        while (
            "penstock_router_shards_serving 2.0"
            not in (await asyncio.to_thread(site.router.ask, "/metrics"))[1]
        ):
            await asyncio.sleep(0.05)


def _spent_s(shard: Shard) -> float:
    """Processors' time of its engine."""
    spent = shard.engine.cpu_times()
    return float(spent.user + spent.system)


@pytest.mark.soak
async def test_a_stream_about_images_is_the_calm_one_when_engines_die(site: ImageSite) -> None:
    rng = seeded("images_over_http")
    files = (
        saved(picture(width=300, height=200), "PNG"),
        saved(picture(width=57, height=99), "JPEG"),
    )
    asked = _asked(site, *files)
    calm = site.post(_PATH, asked)["choices"][0]["message"]["content"]
    told, _ = site.answer_to(asked["messages"], files, _NUM_TOKENS)
    assert calm.rstrip("\ufffd") == told
    async with aiohttp.ClientSession() as session:
        for moment in [0, 1, 20, *(rng.randrange(50) for _ in range(budget(0, 8)))]:
            await _settled(site)
            # None of it is cached.
            salted = {**asked, "stream": True, "cache_salt": f"{moment} {rng.random()}"}
            pieces, is_killed = [], False
            before_s = {shard.address: _spent_s(shard) for shard in site.shards}
            async with session.post(site.router.url + _PATH, json=salted) as response:
                assert response.status == 200
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        assert "error" not in event
                        pieces += [each["delta"].get("content") or "" for each in event["choices"]]
                    if len(pieces) > moment and not is_killed:
                        # The one that has computed it.
                        grown_s = {
                            each: _spent_s(each) - before_s[each.address] for each in site.shards
                        }
                        max(grown_s, key=grown_s.__getitem__).engine.kill()
                        is_killed = True
            assert "".join(pieces) == calm, moment
            # Not every token is a piece of text.
            assert is_killed or moment >= 20
            assert "Traceback" not in site.router.log


# ---- Clients that leave --------------------------------------------------------------------------


@asynccontextmanager
async def _router_here(site: ImageSite, folder: Path) -> AsyncIterator[tuple[str, Any, Fleet]]:
    """A router in this process, so that what it holds can be seen: its URL, itself, its fleet."""
    with (
        ThreadPoolExecutor(2) as executor,
        store_file(str(folder / "responses"), max_bytes=2**20) as path,
    ):
        config = RouterConfig(shards="unused:1", response_store=path, admin_key="operator")
        async with Fleet([shard.address for shard in site.shards]) as fleet:
            app = build_app(config, fleet, executor, Metrics())
            runner = Runner(
                app,
                max_connections=config.max_connections,
                header_timeout_s=config.header_timeout_s,
                write_timeout_s=config.write_timeout_s,
                memory=app[ROUTER].memory,
                error_response=error_of_http,
                handler_cancellation=True,
                shutdown_timeout=1,
            )
            await runner.setup()
            try:
                place = web.TCPSite(runner, "127.0.0.1", 0)
                await place.start()
                host, port = runner.addresses[0][:2]
                while not fleet.shards or app[ROUTER].models.not_ready_because:
                    await asyncio.sleep(0.05)
                yield f"http://{host}:{port}", app[ROUTER], fleet
            finally:
                await runner.cleanup()


def _noise(rng: random.Random) -> bytes:
    pixels = rng.randbytes(IMAGE_BYTES)
    return saved(Image.frombytes("RGB", (SIDE, SIDE), pixels), "PNG", compress_level=0)


async def test_a_client_that_leaves_while_its_image_comes_leaves_nothing_behind(
    site: ImageSite, tmp_path: Path
) -> None:
    rng = seeded("clients_that_leave")
    await _settled(site)
    async with (
        _router_here(site, tmp_path) as (url, router, fleet),
        aiohttp.ClientSession() as asks,
    ):
        took_s = await _took(asks, url, _asked(site, _noise(rng), max_tokens=2))
        for _ in range(budget(6, 40)):
            body = json.dumps(_asked(site, _noise(rng), n=2)).encode()
            asking = asyncio.create_task(_post(asks, url, body))
            await asyncio.sleep(rng.uniform(0, 1.2 * took_s))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await _nothing_held(router, fleet)
        # Each shard has room for one, and what left gave its room back.
        for shard in site.shards:
            headers = {"x-api-key": "operator", "x-penstock-shard": shard.address}
            await _took(asks, url, _asked(site, _noise(rng), max_tokens=2), headers)
        await _nothing_held(router, fleet)
    for shard in site.shards:
        assert "Traceback" not in shard.log


async def _took(asks: aiohttp.ClientSession, url: str, asked: Any, headers: Any = None) -> float:
    begun_s = time.monotonic()
    status, text = await _post(asks, url, json.dumps(asked).encode(), headers)
    assert status == 200, text
    return time.monotonic() - begun_s


async def _post(
    asks: aiohttp.ClientSession, url: str, body: bytes, headers: Any = None
) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", **(headers or {})}
    async with asks.post(url + _PATH, data=BytesIO(body), headers=headers) as response:
        return response.status, await response.text()


async def _nothing_held(router: Any, fleet: Fleet) -> None:
    """Waits until nothing is held but what is only kept, and that is let go as it should be."""
    images, puts = router.images, fleet._continuations._images
    async with asyncio.timeout(20):
        while (
            images._line._jobs
            or images._decoders._work
            or puts._waiting
            or puts._targets
            or puts._putting
            or router.bodies.memory.held
            or router.bodies.queue.held
        ):
            await asyncio.sleep(0.05)
    assert images._line._turns.num_working == 0
    async with asyncio.timeout(20):
        while images._memory.held:
            # What is only kept in case it is asked for again.
            images._images.clear()
            images._pixels.clear()
            gc.collect()
            await asyncio.sleep(0.05)


# ---- Hostile images ------------------------------------------------------------------------------


async def test_health_is_told_at_once_while_hostile_images_come(site: ImageSite) -> None:
    if site.family != "qwen3_vl":
        pytest.skip("the same router")
    await _settled(site)
    bodies = [
        json.dumps(_asked(site, made)).encode()
        for made in (make() for make, _ in REFUSED.values())
        if len(made) < 4_000_000
    ]
    coming = iter(seeded("hostile_images").choices(bodies, k=budget(32, 4000)))
    refused: dict[int, int] = {}

    async def attack(asks: aiohttp.ClientSession) -> None:
        for body in coming:
            status, text = await _post(asks, site.router.url, body)
            assert status in (400, 429), text
            refused[status] = refused.get(status, 0) + 1

    calm_ms = await asyncio.to_thread(_health_ms, site, iter(range(20)))
    async with aiohttp.ClientSession() as asks:
        attacking = asyncio.gather(*(attack(asks) for _ in range(8)))
        going_on = iter(lambda: attacking.done(), True)
        seen_ms = await asyncio.to_thread(_health_ms, site, going_on)
        await attacking
    p50, p99 = statistics.median(seen_ms), statistics.quantiles(seen_ms, n=100)[-1]
    print(
        f"/health: p50 {p50:.1f} ms, p99 {p99:.1f} ms of {len(seen_ms)}; "
        f"calm p50 {statistics.median(calm_ms):.1f} ms; answers {refused}"
    )
    assert refused[400] > 10
    assert p50 < _MOST_HEALTH_MS
    file = saved(picture(width=90, height=50), "JPEG")
    asked = _asked(site, file)
    said = site.post(_PATH, asked)["choices"][0]["message"]["content"]
    assert said.rstrip("\ufffd") == site.answer_to(asked["messages"], [file], _NUM_TOKENS)[0]
    assert "Traceback" not in site.router.log


def _health_ms(site: ImageSite, times: Iterator[object]) -> list[float]:
    connection = http.client.HTTPConnection(site.router.address, timeout=20)
    seen = []
    for _ in times:
        begun_s = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        seen.append(1e3 * (time.perf_counter() - begun_s))
        assert response.status == 200
        time.sleep(0.01)
    connection.close()
    return seen
