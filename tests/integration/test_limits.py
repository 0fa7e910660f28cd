"""Deadlines that hold whoever is gone, fairness and bounds with real processes, and bad starts."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.budget import in_soak
from support.processes import Router, Shard, free_port, running, wait_until

from penstock_client import GenerationRequest, Objective, ShardClient

# 15 s of steps, had it no deadline: what ends within 8 s did so before.
LONG = {"prompt": "On and on", "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    service = Shard(tmp_path_factory.mktemp("limits") / "shard", "--step-ms", "10")
    with running(service):
        yield service


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, shard: Shard) -> Iterator[Router]:
    service = Router(tmp_path_factory.mktemp("limits") / "router", [shard.address])
    with running(service):
        yield service


@pytest.fixture
async def client(shard: Shard) -> AsyncIterator[ShardClient]:
    async with ShardClient(shard.address) as opened:
        yield opened


async def _live(client: ShardClient) -> int:
    """Return the number of sequences that run or wait in the shard."""
    reports = client.watch_load()
    try:
        load = await anext(reports)
        return load.running + load.waiting
    finally:
        await reports.aclose()


async def _until_live(client: ShardClient, count: int) -> float:
    """Wait until `count` sequences run or wait, and return the time (`time.monotonic`, in s)."""
    async with asyncio.timeout(10):
        while await _live(client) != count:
            await asyncio.sleep(0.02)
    return time.monotonic()


# ---- Deadlines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_shard_ends_a_request_at_its_deadline_although_the_router_stands_still(
    router: Router, client: ShardClient, stream: bool
) -> None:
    async with aiohttp.ClientSession() as session:
        body = {**LONG, "stream": stream, "n": 3, "timeout": 1.0}
        begin_s = time.monotonic()
        asking = asyncio.create_task(session.post(router.url + "/v1/completions", json=body))
        await _until_live(client, 3)
        router.process.send_signal(signal.SIGSTOP)
        try:
            took_s = await _until_live(client, 0) - begin_s
        finally:
            router.process.send_signal(signal.SIGCONT)
        assert 0.9 < took_s < 8
        answer = await asking
        if stream:
            assert b'"code":504' in await answer.read()
        else:
            assert answer.status == 504


# The last one of this router.
async def test_a_shard_ends_a_request_when_its_router_is_killed(
    router: Router, client: ShardClient
) -> None:
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(router.url + "/v1/completions", json=LONG))
        await _until_live(client, 1)
        begin_s = time.monotonic()
        router.process.kill()
        assert await _until_live(client, 0) - begin_s < 8
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_direct_request_s_own_deadline_ends_it_in_the_shard(client: ShardClient) -> None:
    request = GenerationRequest([1], max_tokens=1500, objective=Objective(deadline_s=0.5))
    reading = asyncio.create_task(_read(client, request))
    begin_s = await _until_live(client, 1)
    assert await _until_live(client, 0) - begin_s < 8
    await asyncio.gather(reading, return_exceptions=True)


async def _read(client: ShardClient, request: GenerationRequest) -> None:
    async for _ in client.generate(request):
        pass


DIRECT = """
import sys, grpc
from penstock_proto import shard_pb2 as pb
from penstock_proto.shard_pb2_grpc import ShardStub

request = pb.GenerateRequest(
    request_id="direct", prompt_token_ids=[1, 2, 3], stop=pb.StopConditions(max_tokens=1500)
)
with grpc.insecure_channel(sys.argv[1]) as channel:
    for _ in ShardStub(channel).Generate(iter([request]), timeout=1.0):
        pass
"""


def _call_directly(shard: Shard) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DIRECT, shard.address]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("stands_still", [False, True])
async def test_the_grpc_deadline_of_a_call_with_one_request_ends_it_in_the_shard(
    shard: Shard, client: ShardClient, stands_still: bool
) -> None:
    process = _call_directly(shard)
    try:
        begin_s = await _until_live(client, 1)
        if stands_still:
            process.send_signal(signal.SIGSTOP)
        assert await _until_live(client, 0) - begin_s < 8
    finally:
        process.send_signal(signal.SIGCONT)
        _, error = process.communicate(timeout=20)
    assert "DEADLINE_EXCEEDED" in error


# ---- Several workers ---------------------------------------------------------------------------


async def test_bounds_hold_over_all_workers_of_a_router(tmp_path: Path, shard: Shard) -> None:
    flags = ("--workers", "2", "--max-concurrent-requests", "4", "--max-queued-requests", "2")
    router = Router(tmp_path / "router", [shard.address], *flags)
    with running(router):
        await asyncio.to_thread(
            wait_until,
            lambda: router.log.count("listening on") == 2,
            timeout_s=60,
            what="two workers that listen",
        )
        # A connection for each, so that both workers get some.
        connector = aiohttp.TCPConnector(force_close=True, limit=100)
        async with aiohttp.ClientSession(connector=connector) as session:
            body = {**LONG, "max_tokens": 100, "priority": 1}
            asking = [_status(session, router, body) for _ in range(30)]
            statuses = await asyncio.gather(*asking)
            assert set(statuses) == {200, 429}
            # They arrive within less time than an answer takes.
            assert 2 <= statuses.count(200) <= 6
            async with session.get(router.url + "/metrics") as answer:
                text = await answer.text()
        refused = [
            line for line in text.splitlines() if 'refused_total{reason="queue_full"' in line
        ]
        assert float(refused[0].split()[-1]) == statuses.count(429)


async def _status(session: aiohttp.ClientSession, router: Router, body: dict[str, Any]) -> int:
    async with session.post(router.url + "/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


# ---- Bad starts --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["1", in_soak("2")])
@pytest.mark.parametrize("what", ["port", "template", "audit log", "response store", "no number"])
def test_a_start_that_cannot_succeed_is_one_line_and_status_2(
    tmp_path: Path, shard: Shard, what: str, workers: str
) -> None:
    port = str(free_port())
    template, log = tmp_path / "template.jinja", tmp_path / "audit"
    flags = {
        "port": ("--port", shard.address.rpartition(":")[2]),
        "template": ("--chat-template", str(template)),
        "audit log": ("--audit-log", str(tmp_path / "missing" / "log")),
        "response store": ("--response-store", str(log)),
        "no number": ("--queue-timeout-s", "1e308"),
    }
    template.write_bytes(b"\xff\xfe{{")
    log.write_text("something else, and long enough not to be taken for an empty file\n" * 20)
    command = [sys.executable, "-m", "penstock_router", "--shards", shard.address]
    command += ["--workers", workers, "--port", port, *flags[what]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2, ended.stderr
    [line] = ended.stderr.splitlines()
    assert line.startswith("penstock router: ")
    assert flags[what][0] in line or flags[what][1] in line
