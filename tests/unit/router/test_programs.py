"""Templates that requests bring: whom they delay, how long they may run, how many may wait."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from support.router_doubles import Answer, Connection, FakeFleet, MemoryRouter, memory_router

from penstock_router.errors import TimedOut, TooManyRequests
from penstock_router.observe.metrics import Metrics
from penstock_router.offload import request_templates
from penstock_router.offload.request_templates import MAX_PROGRAMS, Programs
from penstock_router.offload.text_messages import Show
from penstock_router.offload.text_pool import Parts, TextPool, TextProcess
from penstock_router.server.parts import ROUTER

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LONG = "the fox " * 9000


def _send(router: MemoryRouter, path: str, **fields: object) -> Connection:
    connection = router.connect()
    data = json.dumps({"max_tokens": 1, **fields}).encode()
    connection.send("POST", path, data, {"Content-Type": "application/json"})
    return connection


async def _endless(router: MemoryRouter, content: str = "x") -> Connection:
    """A request whose template has begun to run for ever."""
    message = {"role": "user", "content": content}
    connection = _send(router, "/v1/chat/completions", messages=[message], chat_template=ENDLESS)
    here = router.app[ROUTER].bodies.programs._here
    async with asyncio.timeout(20):
        while not here.held:
            await asyncio.sleep(0.005)
    return connection


@pytest.mark.parametrize("content", ["x", LONG])
async def test_a_template_that_never_ends_delays_nobody_elses_long_body(
    fleet: FakeFleet, content: str
) -> None:
    async with memory_router(fleet, trust_request_chat_template=True) as router:
        endless = await _endless(router, content)
        answer = await router.post("/tokenize", {"prompt": LONG})
        assert answer.status == 200
        # It still runs.
        assert router.app[ROUTER].bodies.programs._here.held == 1
        endless.close()


async def test_it_is_stopped_after_a_few_seconds_and_the_next_one_runs(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_templates, "MAX_PROGRAM_S", 0.5)
    monkeypatch.setattr("penstock_router.offload.text_pool._GRACE_S", 0.05)
    async with memory_router(fleet, trust_request_chat_template=True) as router:
        endless = await _endless(router)
        sent: asyncio.Task[Answer] = asyncio.create_task(
            router.chat("the fox", chat_template="{{ messages[0].content }}!", max_tokens=1)
        )
        stopped = await endless.read_answer()
        assert stopped.status == 504
        assert "ran for 0.5 s" in stopped.error["message"]
        assert (await sent).status == 200
        endless.close()


async def test_a_client_has_a_share_and_its_further_ones_wait_behind_another_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, numbers = TextPool(1, "info"), itertools.count()
    running = Programs(pool, Metrics())
    order: list[str] = []
    end = asyncio.Event()

    async def do(process: TextProcess, task: Show, parts: Parts, files: object) -> bytes:
        [[client], _] = parts
        order.append(client.decode())
        await end.wait()
        return b""

    monkeypatch.setattr(TextProcess, "do", do)

    async def run(client: str, arrived_s: float) -> None:
        with running.scope(client):
            arrival = arrived_s, next(numbers)
            await pool.run(client, arrival, Show(None), [[client.encode()], []])

    async with asyncio.TaskGroup() as tasks:
        for number in range(MAX_PROGRAMS // 2):
            tasks.create_task(run("greedy", 100.0 + number / 100))
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests, match="16 requests of this client"):
            await run("greedy", 101.0)
        tasks.create_task(run("polite", 102.0))
        await asyncio.sleep(0)
        end.set()
    assert order[:2] == ["greedy", "polite"]
    await pool.close()


def test_what_takes_too_long_gives_the_share_back() -> None:
    running = Programs(TextPool(1, "info"), Metrics())
    with pytest.raises(TimedOut, match="ran for 5 s"), running.scope("a"):
        raise TimeoutError
    assert not running._here.held
