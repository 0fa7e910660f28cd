"""A fleet in the middle of an upgrade: one shard of the baseline, one of now. When one of them
dies or drains, its requests go on at the other, to the very same tokens.
"""

from __future__ import annotations

import asyncio
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from comparison.cases import Json, merge
from comparison.conftest import Sides, fake_flags
from comparison.differences import differences
from comparison.http_cases import http_requests
from comparison.models import CPU, adapter_for_builtin, needs_torch
from comparison.shard_cases import Questions
from comparison.stacks import (
    Answers,
    Reply,
    ask,
    ask_router,
    http_fields,
    questions_for,
    router_of,
    shard_of,
)
from support.budget import budget
from support.checkouts import Checkout
from support.processes import Shard, running

from penstock_client import ShardClient

# Long enough that most requests run when their shard leaves.
_TOKENS = 150
_SIGNALS = {"dies": signal.SIGKILL, "drains": signal.SIGTERM}


def long_questions(questions: Questions) -> dict[str, Json]:
    """Return each question about a generation, made long; in `make test`, every third."""
    generations = {
        name: question["generate"]
        for name, question in questions.each_field().items()
        if "generate" in question
    }
    return {
        name: {"generate": merge(generations[name], {"max_tokens": _TOKENS})}
        for name in list(generations)[:: budget(3, 1)]
    }


def reply_when_one_leaves(
    client: Checkout, shards: list[Shard], event: str, leaving: int, asked: dict[str, Json]
) -> Reply:
    """Return what a fleet answers if one of its shards leaves while all requests are generated."""
    with running(*shards):
        return ask(client, shards, asked, client="fleet", ending=(shards[leaving], _SIGNALS[event]))


def many_went_on(reply: Reply) -> bool:
    """True if more than an eighth of the requests took another attempt. About half of all requests
    ran at the shard that left.
    """
    num_continued = sum(attempts > 1 for attempts in reply.attempts.values())
    print(f"{num_continued} of {len(reply.attempts)} went on elsewhere")
    return num_continued > len(reply.attempts) // 8


@pytest.fixture(scope="package")
def asked(questions: Questions) -> dict[str, Json]:
    return long_questions(questions)


@pytest.fixture(scope="package")
def calm(sides: Sides, asked: dict[str, Json]) -> Answers:
    """The answers of one shard of the baseline."""
    return ask(sides.before.checkout, [sides.before.shard], asked).answers


@pytest.mark.parametrize(
    ("event", "leaving", "asker"),
    [
        ("dies", "before", "now"),
        ("drains", "now", "now"),
        pytest.param("dies", "now", "now", marks=pytest.mark.soak),
        pytest.param("drains", "before", "now", marks=pytest.mark.soak),
        pytest.param("dies", "before", "before", marks=pytest.mark.soak),
        pytest.param("dies", "now", "before", marks=pytest.mark.soak),
        pytest.param("drains", "before", "before", marks=pytest.mark.soak),
        pytest.param("drains", "now", "before", marks=pytest.mark.soak),
    ],
)
def test_requests_go_on_exactly_when_a_shard_of_one_leaves(
    sides: Sides,
    asked: dict[str, Json],
    calm: Answers,
    tmp_path: Path,
    event: str,
    leaving: str,
    asker: str,
) -> None:
    checkouts = {"before": sides.before.checkout, "now": sides.now.checkout}
    # Slower than elsewhere: there is time to end a shard.
    flags = (*fake_flags(tmp_path), "--step-ms", "25")
    shards = [shard_of(each, tmp_path / f"{name}.log", *flags) for name, each in checkouts.items()]
    place = list(checkouts).index(leaving)
    reply = reply_when_one_leaves(checkouts[asker], shards, event, place, asked)
    assert differences(calm, reply.answers) == []
    assert many_went_on(reply)


@pytest.mark.soak
@pytest.mark.parametrize("leaving", [0, 1])
@pytest.mark.parametrize("asker", ["before", "now"])
def test_a_router_s_requests_go_on_exactly_at_the_other(
    sides: Sides, tmp_path: Path, leaving: int, asker: str
) -> None:
    path = "/v1/completions"
    requests = http_requests(path, http_fields(sides.before.router)[path])
    longer = {"max_tokens": _TOKENS}
    asked = {name: (path, merge(body, longer)) for name, (_, body) in requests.items()}
    calm = ask_router(sides.before.router, asked)
    checkouts = {"before": sides.before.checkout, "now": sides.now.checkout}
    flags = (*fake_flags(tmp_path), "--step-ms", "25")
    shards = [shard_of(each, tmp_path / f"{name}.log", *flags) for name, each in checkouts.items()]
    router = router_of(checkouts[asker], tmp_path / "router.log", *shards)
    with running(*shards, router), ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_router, router, asked)
        asyncio.run(wait_busy(shards[leaving]))
        shards[leaving].process.kill()
        assert differences(calm, answers.result()) == []
        metrics = router.ask("/metrics")[1]
    assert re.search(r'^penstock_router_fleet_events_total\{event="continued",', metrics, re.M)


async def wait_busy(shard: Shard) -> None:
    """Wait until the shard runs several requests at once and has computed more steps than half an
    answer takes.
    """
    async with asyncio.timeout(30), ShardClient(shard.address) as client:
        async for report in client.watch_load():
            if report.running > 1 and report.steps_total > _TOKENS // 2:
                return


@needs_torch
@pytest.mark.soak
@pytest.mark.parametrize("event", _SIGNALS)
@pytest.mark.parametrize("leaving", [0, 1])
def test_a_model_goes_on_exactly_at_the_other(
    before: Checkout, now: Checkout, tmp_path: Path, event: str, leaving: int
) -> None:
    flags = (*CPU, *adapter_for_builtin(tmp_path))
    alone = shard_of(before, tmp_path / "alone.log", *flags)
    with running(alone):
        asked = long_questions(questions_for(before, alone))
        calm = ask(before, [alone], asked).answers
    shards = [shard_of(each, tmp_path / f"{each.name}.log", *flags) for each in (before, now)]
    reply = reply_when_one_leaves(now, shards, event, leaving, asked)
    assert differences(calm, reply.answers) == []
    # One that drains finishes what would go on with other numerics.
    assert event == "drains" or many_went_on(reply)
