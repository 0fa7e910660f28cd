"""The router's HTTP edge over a running pair: disconnects, stop strings, bad input, probes."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from integration.conftest import Pair
from support.budget import budget, seeded
from support.processes import Router, Shard, is_alive, running, wait_until

from penstock_client import LoadReport, ShardClient

ALPHABET = ("abcdefgh \n", "äöüßéñ", "東京大阪日本語", "😀🏳️‍🌈👩‍👩‍👧🎉", "مرحبا", "\u0301\u200d")


@pytest.fixture
async def session(pair) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(pair.url) as session:
        yield session


async def _post(session: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with session.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def _stream_text(session: aiohttp.ClientSession, body: Any) -> tuple[str, str | None]:
    """Text and finish reason of a streamed completion; checks the frames on the way."""
    text, finish, done = "", None, 0
    async with session.post("/v1/completions", json={**body, "stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                done += 1
            elif line.startswith(b"data: "):
                (choice,) = json.loads(line[6:])["choices"]
                assert finish is None
                text += choice["text"]
                finish = choice["finish_reason"]
    assert done == 1
    return text, finish


async def _wait_idle(shard: Shard) -> None:
    async with ShardClient(shard.address) as client:
        reports = client.watch_load()
        try:
            async with asyncio.timeout(5):
                async for load in reports:
                    if not (load.running or load.waiting or load.referenced_blocks):
                        return
        finally:
            await reports.aclose()


# ---- stop strings and text ----


async def test_a_stop_string_over_three_tokens_cuts_exactly(session: aiohttp.ClientSession) -> None:
    rng = seeded("stop over three tokens")
    for _ in range(budget(5, 100)):
        body = {"prompt": "Hello", "max_tokens": 40, "seed": rng.randrange(2**31), "logprobs": 0}
        answer = (await _post(session, "/v1/completions", body))["choices"][0]
        text, offsets = answer["text"], answer["logprobs"]["text_offset"]
        at = rng.randrange(len(offsets) - 3)
        # From inside the first token to inside the third, so that no border helps.
        start, end = offsets[at] + 1, offsets[at + 2] + 1
        stop = text[start:end]
        if "\ufffd" in stop or len(stop) < 2 or text.find(stop) != start:
            continue
        stopped = (await _post(session, "/v1/completions", {**body, "stop": [stop]}))["choices"][0]
        assert stopped["text"] == text[:start]
        assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)


async def test_streaming_equals_non_streaming_for_random_prompts_with_stops(
    session: aiohttp.ClientSession,
) -> None:
    rng = seeded("stream equals whole")
    for _ in range(budget(15, 200)):
        prompt = "".join(rng.choice(rng.choice(ALPHABET)) for _ in range(rng.randint(1, 40)))
        body = {
            "prompt": prompt,
            "max_tokens": rng.randint(1, 60),
            "seed": rng.randrange(2**31),
            "stop": [rng.choice("aeiou ") + rng.choice("nst ") for _ in range(rng.randint(0, 3))],
        }
        whole = (await _post(session, "/v1/completions", body))["choices"][0]
        assert await _stream_text(session, body) == (whole["text"], whole["finish_reason"]), body


async def test_a_stop_string_aborts_in_the_shard(pair, session: aiohttp.ClientSession) -> None:
    body = {"prompt": "Hello", "max_tokens": 1500, "seed": 4}
    text = (await _post(session, "/v1/completions", {**body, "max_tokens": 20}))["choices"][0][
        "text"
    ]
    stop = text[5:7]
    await _post(session, "/v1/completions", {**body, "stop": stop})
    await _wait_idle(pair.shard)


# ---- clients that go away ----

_LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 1900}


@pytest.fixture(scope="module")
def slow_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Router, Shard]]:
    """Steps of 400 ms, so that a step can be told from the time a message takes."""
    logs = tmp_path_factory.mktemp("slow")
    flags = ("--step-ms", "400", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    shard = Shard(logs / "shard", *flags)
    router = Router(logs / "router", [shard.address])
    with running(shard, router):
        yield router, shard


@pytest.mark.parametrize(
    ("body", "clients"),
    [
        ({**_LONG, "stream": True}, 1),
        (_LONG, 1),
        ({**_LONG, "n": 4}, 1),
        ({**_LONG, "n": 4, "stream": True}, 1),
        ({**_LONG, "prompt": ["a", "b", "c"]}, 1),
        ({**_LONG, "prompt": "word " * 1900, "max_tokens": 50}, 1),
        (_LONG, 20),
    ],
    ids=["streaming", "whole", "n=4", "n=4 streaming", "batch", "mid-prefill", "queued"],
)
async def test_blocks_of_clients_that_go_away_are_free_within_two_steps(
    slow_pair: tuple[Router, Shard], body: Any, clients: int
) -> None:
    router, shard = slow_pair
    async with (
        ShardClient(shard.address) as watcher,
        aiohttp.ClientSession(router.url) as session,
    ):
        reports = watcher.watch_load()
        tasks = [asyncio.create_task(_read_all(session, body)) for _ in range(clients)]
        async for load in reports:
            if load.referenced_blocks and load.running + load.waiting >= clients:
                break
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        at_cancel = await _load_now(watcher)
        async for load in reports:
            if not (load.referenced_blocks or load.running or load.waiting):
                break
        # Reports are up to 100 ms old: the step that ran while they travelled counts too.
        assert load.steps_total - at_cancel.steps_total <= 2
        await reports.aclose()


async def _load_now(client: ShardClient) -> LoadReport:
    reports = client.watch_load()
    try:
        return await anext(reports)
    finally:
        await reports.aclose()


async def test_two_hundred_clients_that_time_out_leave_room_for_the_next(pair) -> None:
    async with aiohttp.ClientSession(pair.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        timeout = aiohttp.ClientTimeout(total=0.5)
        results = await asyncio.gather(
            *(
                session.post("/v1/completions", json=_LONG, timeout=timeout)
                for _ in range(budget(100, 200))
            ),
            return_exceptions=True,
        )
        assert all(isinstance(result, TimeoutError) for result in results)
        async with asyncio.timeout(5):
            await _post(session, "/v1/completions", {"prompt": "x", "max_tokens": 10})
    await _wait_idle(pair.shard)


async def _status(session: aiohttp.ClientSession, body: Any) -> int:
    async with session.post("/v1/completions", json=body) as response:
        return response.status


async def _read_all(session: aiohttp.ClientSession, body: Any) -> None:
    async with session.post("/v1/completions", json=body) as response:
        async for _ in response.content:
            pass


# ---- bad input ----


@pytest.mark.parametrize(
    ("data", "content_type", "statuses"),
    [
        (b"{", "application/json", {400}),
        (b"", "application/json", {400}),
        (b"[]", "application/json", {400}),
        (b'"x"', "application/json", {400}),
        (b"\xff\xfe", "application/json", {400}),
        (b'{"prompt": NaN}', "application/json", {400}),
        (b"[" * 100_000, "application/json", {400}),
        (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "application/json", {400}),
        (b'{"prompt": {"a": 1}}', "application/json", {400}),
        (b'{"prompt": [1, "x"]}', "application/json", {400}),
        (b'{"prompt": [-1]}', "application/json", {400}),
        (b'{"prompt": [99999999999999]}', "application/json", {400}),
        (b'{"prompt": "x", "max_tokens": "many"}', "application/json", {400}),
        (b'{"prompt": "x", "max_tokens": true}', "application/json", {400}),
        (b'{"prompt": "x", "seed": 99999999999999999999}', "application/json", {400}),
        (b'{"prompt": "x", "stop": [""]}', "application/json", {400}),
        (b'{"prompt": "x", "n": 0}', "application/json", {400}),
        (b'{"prompt": "x", "n": 100000}', "application/json", {400}),
        (b'{"prompt": "x", "logprobs": 21}', "application/json", {400}),
        (b'{"prompt": "x", "stream_options": {"include_usage": true}}', "application/json", {400}),
        (b'{"prompt": "\\ud800"}', "application/json", {200, 400}),
        (b"prompt=x", "application/x-www-form-urlencoded", {400, 415}),
        (b'{"prompt": "x"}', "text/plain", {400, 415}),
    ],
)  # fmt: skip
async def test_a_bad_body_is_a_4xx_with_a_reason(
    session: aiohttp.ClientSession, data: bytes, content_type: str, statuses: set[int]
) -> None:
    headers = {"Content-Type": content_type, "X-Request-Id": "mine"}
    async with session.post("/v1/completions", data=data, headers=headers) as response:
        assert response.status in statuses
        assert response.headers["X-Request-Id"] == "mine"
        text = await response.text()
        if response.status != 200:
            error = json.loads(text)["error"]
            assert error["message"]
            assert len(text) < 2000
            assert "Traceback" not in text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/nope", 404)],
)
async def test_an_unknown_route_or_method_is_a_json_error(
    session: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with session.request(method, path) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]


async def test_a_body_over_the_limit_is_refused(session: aiohttp.ClientSession) -> None:
    body = io.BytesIO(b'{"prompt": "' + b"x" * (40 << 20) + b'"}')
    headers = {"Content-Type": "application/json"}
    async with session.post("/v1/completions", data=body, headers=headers) as response:
        assert response.status == 413
        assert "bytes" in (await response.json())["error"]["message"]


# ---- probes, keys, processes ----


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair to break: the last test with it ends its shard."""
    logs = tmp_path_factory.mktemp("own")
    shard = Shard(logs / "shard", "--step-ms", "5")
    router = Router(logs / "router", [shard.address])
    with running(shard, router):
        yield Pair(router, shard)


async def test_streams_do_not_notice_that_the_only_engine_was_killed(own: Pair) -> None:
    async with aiohttp.ClientSession(own.url) as session:
        body = {"prompt": "On", "max_tokens": 120, "seed": 1, "stream": True, "logprobs": 1}

        async def text() -> str:
            async with session.post("/v1/completions", json=body) as response:
                lines = [line async for line in response.content if line.strip()]
            assert lines[-1] == b"data: [DONE]\n"
            assert not any(b"error" in line for line in lines)
            events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
            return "".join(event["choices"][0]["text"] for event in events)

        calm = await text()
        streams = [asyncio.create_task(text()) for _ in range(4)]
        await asyncio.sleep(0.3)
        own.shard.engine.kill()
        assert await asyncio.gather(*streams) == [calm] * 4


async def _check_probes_without_a_shard(router: Router, shard: Shard) -> None:
    wait_until(lambda: router.status("/health") == 503, timeout_s=30, what="/health is 503")
    assert router.status("/live") == 200
    async with aiohttp.ClientSession(router.url) as session:
        for path, status in {"/live": 200, "/health": 503, "/ping": 503, "/ready": 503}.items():
            async with session.head(path) as response:
                assert (response.status, await response.read()) == (status, b"")
    async with (
        aiohttp.ClientSession(router.url) as session,
        session.post("/v1/completions", json={"prompt": "x"}) as response,
    ):
        assert response.status == 503
        assert "Retry-After" in response.headers
        message = (await response.json())["error"]["message"]
        assert "no shard" in message
        # Where shards are is not for clients to know.
        assert shard.address not in message
    assert router.terminate() == 0


async def test_when_no_shard_comes_back_in_time_a_stream_ends_in_one_error_frame_and_probes_fail(
    own: Pair, tmp_path: Path
) -> None:
    shard = own.shard
    router = Router(tmp_path / "router", [shard.address], "--failover-timeout-s", "0.5")
    with running(router):
        own.router.wait_healthy()
        assert own.router.status("/health") == own.router.status("/live") == 200
        async with aiohttp.ClientSession(router.url) as session:

            async def frames() -> list[bytes]:
                body = {**_LONG, "stream": True}
                async with session.post("/v1/completions", json=body) as response:
                    return [line async for line in response.content if line.strip()]

            streams = [asyncio.create_task(frames()) for _ in range(4)]
            await asyncio.sleep(0.5)
            shard.close()
            async with asyncio.timeout(20):
                results = await asyncio.gather(*streams)
            for lines in results:
                assert b'"code":503' in lines[-2]
                assert lines[-1] == b"data: [DONE]\n"
                assert sum(line == b"data: [DONE]\n" for line in lines) == 1
            assert await _status(session, {"prompt": "x", "max_tokens": 3}) == 503
        await _check_probes_without_a_shard(own.router, shard)


async def test_two_workers_share_one_port_and_a_key_and_end_together(pair, tmp_path: Path) -> None:
    flags = ("--workers", "2", "--api-key", "s3cret")
    router = Router(tmp_path / "router", [pair.shard.address], *flags)
    with running(router):
        # Probes want no key.
        assert router.status("/health") == router.status("/metrics") == 200
        async with aiohttp.ClientSession(router.url) as session:
            for key, status in ((None, 401), ("wrong", 401), ("s3cret", 200)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with session.get("/v1/models", headers=headers) as response:
                    assert response.status == status
        workers = psutil.Process(router.process.pid).children(recursive=True)
        async with aiohttp.ClientSession(router.url, headers=headers) as session:
            body = {"prompt": "x", "max_tokens": 5, "seed": 1}
            answers = await asyncio.gather(
                *(_post(session, "/v1/completions", body) for _ in range(20))
            )
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert router.terminate() == 0
        assert "s3cret" not in router.log
        # The parent waited for its workers; Python's own helper process ends by itself after it.
        wait_until(
            lambda: not [worker for worker in workers if is_alive(worker)],
            timeout_s=30,
            what="no process is left",
        )


def test_a_router_on_a_port_in_use_is_one_clear_line(pair) -> None:
    port = pair.url.rpartition(":")[2]
    run = subprocess.run(
        [sys.executable, "-m", "penstock_router", "--shards", pair.shard.address, "--port", port],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.returncode == 2
    assert port in run.stderr
    assert "Traceback" not in run.stderr


async def _metric(session: aiohttp.ClientSession, name: str) -> float:
    async with session.get("/metrics") as response:
        assert response.status == 200
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def test_metrics_count_what_was_served(session: aiohttp.ClientSession) -> None:
    name = "penstock_router_output_tokens_total"
    before = await _metric(session, name)
    await _post(session, "/v1/completions", {"prompt": "x", "max_tokens": 9})
    assert await _metric(session, name) == before + 9


async def test_metrics_count_answers_by_their_status(session: aiohttp.ClientSession) -> None:
    labels = 'model="",outcome="refused",route="/v1/completions",status="400"'
    name = f"penstock_router_requests_total{{{labels}}}"
    before = await _metric(session, name)
    assert await _status(session, {"prompt": ""}) == 400
    assert await _metric(session, name) == before + 1


def test_the_router_stays_small(pair) -> None:
    used_bytes = psutil.Process(pair.router.process.pid).memory_info().rss
    assert used_bytes < 150e6, f"{used_bytes / 1e6:.0f} MB"
