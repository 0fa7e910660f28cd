"""Long bodies beside everything else: the router answers others at once, whatever they hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from integration.conftest import Pair
from support.budget import budget, in_soak
from support.processes import Router, Shard, is_alive, running, wait_until

WORDS = "the quick brown fox jumps " * 8_000
USER = {"role": "user", "content": WORDS}
# By path: a long body, and the status where its text does not fit into the context.
ROUTES: dict[str, tuple[dict[str, Any], int]] = {
    "/v1/completions": ({"prompt": [WORDS, WORDS], "max_tokens": 1}, 400),
    "/v1/chat/completions": ({"messages": [USER], "max_tokens": 1}, 400),
    "/v1/messages": ({"model": "tgi", "messages": [USER], "max_tokens": 1}, 400),
    "/v1/messages/count_tokens": ({"model": "tgi", "messages": [USER]}, 200),
    "/v1/responses": ({"input": WORDS, "max_output_tokens": 1}, 400),
    "/v1/embeddings": ({"input": WORDS}, 400),
    "/generate": ({"inputs": WORDS, "parameters": {"max_new_tokens": 1}}, 422),
    "/generate_stream": ({"inputs": WORDS, "parameters": {"max_new_tokens": 1}}, 422),
    "/": ({"inputs": WORDS, "parameters": {"max_new_tokens": 1}}, 422),
    "/invocations": ({"prompt": WORDS, "max_tokens": 1}, 400),
    "/tokenize": ({"prompt": WORDS}, 200),
    "/chat_tokenize": ({"messages": [USER]}, 200),
    "/detokenize": ({"tokens": [40, 41, 42] * 30_000}, 200),
}
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


# Routes of one kind do the same with what is served: text made ids, and messages made text.
KINDS = ("/v1/completions", "/chat_tokenize")
PLACES = [
    *(("refusing", path) for path in ROUTES),
    *(("serving", path) if path in KINDS else in_soak("serving", path) for path in ROUTES),
]


@contextlib.contextmanager
def pair_of(logs: Path, context: int) -> Iterator[Pair]:
    flags = ("--max-model-len", str(context), "--step-ms", "2", "--kv-blocks", "200000")
    shard = Shard(logs / "shard", *flags, "--embeddings", "last")
    router = Router(logs / "router", [shard.address])
    with running(shard, router):
        yield Pair(router, shard)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(tmp_path_factory.mktemp("refusing"), 2048) as made:
        yield made


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(tmp_path_factory.mktemp("serving"), 400_000) as made:
        yield made


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> int:
    async with session.post(url, json=body) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize(("place", "path"), PLACES)
async def test_others_are_answered_at_once_while_long_bodies_come(
    request: pytest.FixtureRequest, session: aiohttp.ClientSession, place: str, path: str
) -> None:
    router = request.getfixturevalue(place).router
    body, refused = ROUTES[path]
    expected = refused if place == "refusing" else 200
    count = budget(3, 8)
    posts = [asyncio.create_task(post(session, router.url + path, body)) for _ in range(count)]
    took_s = []
    while not all(task.done() for task in posts):
        began_s = time.perf_counter()
        async with session.get(f"{router.url}/health") as response:
            assert response.status == 200
        took_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(0.01)
    assert Counter(task.result() for task in posts) == {expected: count}
    # Nobody knows how busy this machine is; what is worked on here takes seconds.
    assert max(took_s) < 0.5


async def test_the_answer_to_a_long_body_is_that_to_a_short_one(
    refusing: Pair, session: aiohttp.ClientSession
) -> None:
    """The long body is the short one after 100,000 spaces."""
    body = {"prompt": "the quick brown fox", "max_tokens": 8, "seed": 1, "echo": True}
    texts = []
    for space in ("", " " * 100_000):
        data = (space + json.dumps(body)).encode()
        headers = {"Content-Type": "application/json"}
        url = f"{refusing.url}/v1/completions"
        async with session.post(url, data=data, headers=headers) as response:
            texts.append((await response.json())["choices"])
    assert texts[0] == texts[1]


# ---- text processes that are lost --------------------------------------------------------------


def trusting_router(logs: Path, pair: Pair) -> Router:
    """Return a router that accepts templates in requests, which can keep a text process busy for
    ever.
    """
    return Router(logs / "router", [pair.shard.address], "--trust-request-chat-template")


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory, refusing: Pair) -> Iterator[Router]:
    router = trusting_router(tmp_path_factory.mktemp("trusting"), refusing)
    with running(router):
        yield router


@pytest.fixture
def ending(tmp_path: Path, refusing: Pair) -> Iterator[Router]:
    router = trusting_router(tmp_path, refusing)
    with running(router):
        yield router


async def endless_work(
    session: aiohttp.ClientSession, router: Router
) -> tuple[asyncio.Task[int], psutil.Process]:
    """A request that has no end, and the text process that works on it.

    A router gives up such work after some seconds, in which text processes, which let all others go
    first, get hardly any time on a busy machine: then it is asked again.
    """

    before_s = {child: child.cpu_times().user for child in router.children if is_alive(child)}

    def busy() -> list[psutil.Process]:
        found = []
        for child in router.children:
            with contextlib.suppress(psutil.NoSuchProcess):
                used_s = child.cpu_times().user - before_s.get(child, 0.0)
                found += [child] * (is_alive(child) and used_s > 0.6)
        return found

    task = endless(session, router)
    async with asyncio.timeout(90):
        while not (found := busy()):
            if task.done():
                task = endless(session, router)
            # Who looks takes time from what is looked at.
            await asyncio.sleep(0.1)
    [process] = found
    return task, process


def endless(session: aiohttp.ClientSession, router: Router) -> asyncio.Task[int]:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": ENDLESS}
    return asyncio.create_task(post(session, f"{router.url}/v1/chat/completions", body))


async def test_a_text_process_that_is_killed_costs_its_request_only(
    trusting: Router, session: aiohttp.ClientSession
) -> None:
    assert trusting.children == []
    task, process = await endless_work(session, trusting)
    assert [child for child in trusting.children if is_alive(child)] == [process]
    process.kill()
    assert await task == 503
    assert await post(session, f"{trusting.url}/tokenize", {"prompt": WORDS}) == 200


async def test_work_without_end_delays_nobody_and_goes_with_its_client(
    trusting: Router, session: aiohttp.ClientSession
) -> None:
    async with asyncio.timeout(90):
        while True:
            task, process = await endless_work(session, trusting)
            assert await post(session, f"{trusting.url}/tokenize", {"prompt": WORDS}) == 200
            # On a busy machine the work may be given up meanwhile.
            if is_alive(process):
                break
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(
        wait_until, lambda: not is_alive(process), timeout_s=20, what="the endless work ended"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_text_process_ends_with_its_router_whatever_it_does(
    ending: Router, session: aiohttp.ClientSession, number: signal.Signals
) -> None:
    task, process = await endless_work(session, ending)
    if number == signal.SIGTERM:
        # Else the router waits for it.
        task.cancel()
        await asyncio.sleep(0.1)
    ending.process.send_signal(number)
    ending.process.wait(20)
    wait_until(lambda: not is_alive(process), timeout_s=5, what="the text process ended")
    await asyncio.gather(task, return_exceptions=True)
