"""Streams that are cut off and taken up again, on the same router or another one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from support.budget import budget, seeded
from support.processes import Router, Shard, running
from support.resumable_answers import LASTING, Answer, begun, read, read_on

KEY = ("--resume-key", "shared", "--resume-grace-s", "0.5")


@dataclass(frozen=True)
class Two:
    """Two routers with one key, in front of the same two shards."""

    routers: tuple[Router, Router]
    shards: tuple[Shard, Shard]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    logs = tmp_path_factory.mktemp("two")
    flags = ("--step-ms", "5", "--max-num-batched-tokens", "512")
    shards = (Shard(logs / "shard0", *flags), Shard(logs / "shard1", *flags))
    addresses = [shard.address for shard in shards]
    routers = (Router(logs / "router0", addresses, *KEY), Router(logs / "router1", addresses, *KEY))
    with running(*shards, *routers):
        yield Two(routers, shards)


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The fox", "max_tokens": 60, "seed": 5}),
    ("/v1/completions", {"prompt": "A", "max_tokens": 50, "n": 3, "logprobs": 2}),
    ("/v1/completions", {"prompt": "Echo me", "max_tokens": 40, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 40, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "Stop", "max_tokens": 80, "stop": ["a", "the"], "seed": 3,
                         "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60,
                              "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_answer_in_pieces_is_the_answer_in_one(
    two: Two, path: str, body: dict[str, Any]
) -> None:
    rng = seeded("an_answer_in_pieces")
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for _ in range(budget(1, 40)):
        answer = Answer()
        await read(two.routers[0].url, path, body, answer, most=rng.randrange(1, 12))
        first_id = answer.last_id
        pieces = 1
        while not answer.done:
            # On the other router, on this one while it still runs there, or after its time.
            await asyncio.sleep(rng.choice([0, 0, 0.1, 0.7]))
            most = None if pieces > 4 else rng.randrange(1, 20)
            assert await read(rng.choice(two.routers).url, path, body, answer, most=most) == 200
            pieces += 1
        assert len(answer.envelope) == 1
        # The same answer once more, from where the first piece ended and without a cut.
        if first_id:
            again = Answer(last_id=first_id)
            assert await read(two.routers[1].url, path, body, again) == 200
            assert again.done
            for index, text in again.texts.items():
                assert answer.texts[index].endswith(text)
        assert answer.finish_reasons.keys() == answer.texts.keys()
        if "seed" in body:
            whole = Answer()
            await read(two.routers[1].url, path, body, whole)
            assert answer.shown == whole.shown


async def _status(two: Two, body: object, **headers: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            two.routers[0].url + "/v1/completions",
            json=body,
            headers={"x-penstock-resumable": "1", **headers},
        ) as response,
    ):
        return response.status, await response.text()


async def test_forged_ids_and_those_of_other_requests_are_refused_in_one_line(two: Two) -> None:
    body = {"prompt": "Hello", "max_tokens": 30, "stream": True}
    answer = Answer()
    await read(two.routers[0].url, "/v1/completions", body, answer, most=4)
    good = answer.last_id
    rng = random.Random(1)
    position = rng.randrange(len(good))
    forged = good[:position] + ("A" if good[position] != "A" else "B") + good[position + 1 :]
    for bad in (forged, "nonsense", good[:-3], "\xff", "A" * 20_000):
        if bad.isascii() and len(bad) < 8000:
            status, text = await _status(two, body, **{"Last-Event-ID": bad})
            assert (status, "Last-Event-ID: is not the id" in text) == (400, True)
    status, text = await _status(two, {**body, "max_tokens": 31}, **{"Last-Event-ID": good})
    assert (status, "is of the answer to another request" in text) == (400, True)
    status, text = await _status(two, {**body, "stream": False})
    assert (status, "only a stream" in text) == (400, True)
    status, text = await _status(two, body, **{"x-penstock-exact": "yes"})
    assert (status, "x-penstock-exact: 'yes' must be 0 or 1" in text) == (400, True)


async def test_a_stream_that_nobody_takes_up_again_ends_after_its_grace_time(two: Two) -> None:
    body = {"prompt": "Alone", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    answer = Answer()
    await read(two.routers[0].url, "/v1/completions", body, answer, most=5)
    # Far sooner than its tokens take, in any case.
    async with asyncio.timeout(8), aiohttp.ClientSession() as session:
        while True:
            async with session.get(two.routers[0].url + "/metrics") as response:
                text = await response.text()
            if "penstock_router_sequences_in_flight 0.0" in text:
                break
            await asyncio.sleep(0.1)
    assert await read(two.routers[0].url, "/v1/completions", body, answer, most=3) == 200


# The last one: it kills a router of the two.
async def test_an_answer_outlives_the_router_that_began_it(two: Two) -> None:
    dying, other = two.routers
    body = {**LASTING, "prompt": "On and on"}
    whole = Answer()
    await read(other.url, "/v1/completions", body, whole)
    answers = [Answer() for _ in range(4)]
    reads = [
        asyncio.create_task(read(dying.url, "/v1/completions", body, answer)) for answer in answers
    ]
    await begun(answers)
    dying.process.kill()
    await asyncio.gather(*reads, return_exceptions=True)
    assert not any(answer.done for answer in answers)
    await read_on(other.url, body, answers)
    assert all(answer.shown == whole.shown for answer in answers)
