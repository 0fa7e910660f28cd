"""A pool at zero: requests for its model are held, are counted, and are answered when it wakes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from support.processes import Router, Shard, free_port, running

HELD = 100
MODEL = "penstock-toy"


async def ask(session: aiohttp.ClientSession, number: int) -> tuple[int, str]:
    body = {"model": MODEL, "prompt": f"number {number}", "max_tokens": 4, "seed": 1}
    async with session.post("/v1/completions", json=body) as answer:
        fields = await answer.json()
        if answer.status != 200:
            return answer.status, fields["error"]["message"]
        return 200, fields["choices"][0]["text"]


async def held_by(session: aiohttp.ClientSession) -> float:
    async with session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    label = f'penstock_router_requests_held{{model="{MODEL}"}} '
    return sum(float(line.removeprefix(label)) for line in lines if line.startswith(label))


async def test_a_hundred_held_requests_are_answered_when_the_first_shard_comes(
    tmp_path: Path,
) -> None:
    port = free_port()
    flags = ("--shard-wait-s", "120", "--expect-model", MODEL)
    router = Router(tmp_path / "router", [f"127.0.0.1:{port}"], *flags)
    with running(router):
        async with aiohttp.ClientSession(
            router.url, connector=aiohttp.TCPConnector(limit=0)
        ) as session:
            asking = [asyncio.create_task(ask(session, number)) for number in range(HELD)]
            async with asyncio.timeout(30):
                # What an autoscaler asks for.
                while await held_by(session) < HELD:
                    await asyncio.sleep(0.1)
            shard = Shard(tmp_path / "shard", "--step-ms", "1", port=port)
            try:
                held = await asyncio.wait_for(asyncio.gather(*asking), 60)
                calm = [await ask(session, number) for number in range(0, HELD, 10)]
            finally:
                shard.close()
            assert await held_by(session) == 0
    assert {status for status, _ in held} == {200}
    assert held[::10] == calm


async def test_a_request_that_is_held_in_vain_ends_in_one_line(tmp_path: Path) -> None:
    flags = ("--shard-wait-s", "1", "--expect-model", MODEL)
    router = Router(tmp_path / "router", [f"127.0.0.1:{free_port()}"], *flags)
    with running(router):
        async with aiohttp.ClientSession(
            router.url, connector=aiohttp.TCPConnector(limit=0)
        ) as session:
            begun_s = asyncio.get_running_loop().time()
            status, message = await ask(session, 0)
            assert asyncio.get_running_loop().time() - begun_s >= 1
            assert await held_by(session) == 0
    assert status == 503
    assert message.startswith("no shard serves")
    assert "\n" not in message
