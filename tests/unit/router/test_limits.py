"""Bounds, waiting and deadlines as clients meet them on each route."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.router_doubles import Answer, FakeFleet, MemoryRouter, memory_router, model_files
from tokenizers import Tokenizer

from penstock_common import key_file_format
from penstock_proto.facts import ShardInfo
from penstock_router.generation import resumable_streams
from penstock_router.served_models import Models
from penstock_router.server.parts import ROUTER

CHAT = {"messages": [{"role": "user", "content": "x"}]}
# By name: the path, and a body that asks for one sequence.
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}),
    "chat": ("/v1/chat/completions", CHAT),
    "messages": ("/v1/messages", {**CHAT, "model": "fake-model", "max_tokens": 100}),
    "responses": ("/v1/responses", {"input": "x"}),
    "invocations": ("/invocations", CHAT),
    "embeddings": ("/v1/embeddings", {"input": "x"}),
    "generate": ("/generate", {"inputs": "x"}),
    "generate_stream": ("/generate_stream", {"inputs": "x"}),
}
TEXT_ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": ("/tokenize", {"prompt": "x"}),
    "detokenize": ("/detokenize", {"tokens": [5]}),
    "count_tokens": ("/v1/messages/count_tokens", {**CHAT, "model": "fake-model"}),
    "chat_tokenize": ("/chat_tokenize", CHAT),
}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def slow_fleet(tokenizer: Tokenizer) -> FakeFleet:
    """Return a fleet whose answers end only when somebody ends them."""
    return FakeFleet(model_files(tokenizer), step_s=0.02, script=lambda request: [5] * 100_000)


def send(
    router: MemoryRouter, *, address: str = "", headers: dict[str, str] | None = None, **more: Any
) -> asyncio.Task[Answer]:
    """A request that takes for ever, but for `max_tokens`."""
    body = json.dumps({"prompt": "x", **more}).encode()
    return asyncio.create_task(
        router.request("POST", "/v1/completions", body, headers or {}, address)
    )


async def fill(router: MemoryRouter) -> asyncio.Task[Answer]:
    """Take the only place there is."""
    running = send(router)
    await until(lambda: router.app[ROUTER].admission.in_flight == 1)
    return running


@asynccontextmanager
async def small_router(fleet: FakeFleet, **settings: Any) -> AsyncIterator[MemoryRouter]:
    """Yield a router that has one place, and waits for nobody when it stops."""
    settings = {"max_concurrent_requests": 1, "shutdown_timeout_s": 0.01, **settings}
    async with memory_router(fleet, **settings) as router:
        yield router


async def leave(*tasks: asyncio.Task[Answer]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- Waiting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTES)
async def test_a_request_that_finds_no_place_waits_for_one(
    byte_level: Tokenizer, name: str
) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.01, script=lambda request: [5] * 10)
    async with small_router(fleet) as router:
        admission = router.app[ROUTER].admission
        first = await fill(router)
        path, body = ROUTES[name]
        waiting = asyncio.create_task(router.post(path, body))
        await until(lambda: admission.queued_tokens)
        assert (admission.in_flight, admission.queued) == (1, 1)
        assert len(fleet.requests) == 1
        assert (await first).status == 200
        assert (await waiting).status == 200
        assert (admission.in_flight, admission.queued) == (0, 0)


@pytest.mark.parametrize("name", [*ROUTES, *TEXT_ROUTES])
async def test_with_a_full_queue_every_route_answers_429(byte_level: Tokenizer, name: str) -> None:
    bounds = {"max_queued_requests": 0}
    async with small_router(slow_fleet(byte_level), **bounds) as router:
        running = await fill(router)
        path, body = {**ROUTES, **TEXT_ROUTES}[name]
        answer = await router.post(path, body)
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert b"has no room" in answer.body
        await leave(running)


@pytest.mark.parametrize("name", TEXT_ROUTES)
async def test_text_work_needs_no_place_in_flight(byte_level: Tokenizer, name: str) -> None:
    bounds = {"max_queued_requests": 1}
    async with small_router(slow_fleet(byte_level), **bounds) as router:
        running = await fill(router)
        assert (await router.post(*TEXT_ROUTES[name])).status == 200
        await leave(running)


async def test_whoever_asks_how_the_router_is_waits_for_nobody(byte_level: Tokenizer) -> None:
    bounds = {"max_queued_requests": 1}
    async with small_router(slow_fleet(byte_level), **bounds) as router:
        tasks = [await fill(router), send(router)]
        await until(lambda: router.app[ROUTER].admission.queued_tokens)
        paths = ("/health", "/ready", "/v1/models", "/metrics", "/load", "/info", "/version")
        for path in paths:
            assert (await router.get(path)).status == 200
        load = (await router.get("/load")).json()
        assert (load["server_load"], load["queued"]) == (1, 1)
        assert load["queued_tokens"] >= 1
        await router.complete()
        text = (await router.get("/metrics")).body.decode()
        assert "penstock_router_sequences_queued 1.0" in text
        assert f"penstock_router_prompt_tokens_queued {float(load['queued_tokens'])}" in text
        assert 'penstock_router_refused_total{reason="queue_full"} 1.0' in text
        await leave(*tasks)


async def test_a_client_that_leaves_the_queue_leaves_nothing_there(byte_level: Tokenizer) -> None:
    fleet = slow_fleet(byte_level)
    async with small_router(fleet) as router:
        running, connection = await fill(router), router.connect()
        connection.send("POST", "/v1/completions", b'{"prompt": "x"}', {})
        admission = router.app[ROUTER].admission
        await until(lambda: admission.queued_tokens)
        connection.close()
        await until(lambda: not admission.queued)
        assert len(fleet.requests) == 1
        await leave(running)


async def test_a_response_in_the_background_keeps_its_place_until_it_is_made(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.01, script=lambda request: [5] * 10)
    async with small_router(fleet) as router:
        begun = await router.post("/v1/responses", {"input": "x", "background": True})
        assert begun.json()["status"] == "queued"
        assert router.app[ROUTER].admission.in_flight == 1
        assert (await router.complete()).status == 200
        await until(lambda: not router.app[ROUTER].admission.in_flight)


async def test_what_waits_when_the_router_stops_is_told_so(byte_level: Tokenizer) -> None:
    async with small_router(slow_fleet(byte_level), shutdown_timeout_s=0.1) as router:
        running = await fill(router)
        waiting = send(router)
        await until(lambda: router.app[ROUTER].admission.queued_tokens)
    for task in (running, waiting):
        answer = await task
        assert (answer.status, answer.error["message"]) == (503, "the router is shutting down")


@pytest.mark.parametrize("name", [*ROUTES, *TEXT_ROUTES])
async def test_a_router_that_stops_says_when_to_come_back_on_every_route(
    byte_level: Tokenizer, name: str
) -> None:
    async with memory_router(FakeFleet(model_files(byte_level))) as router:
        router.app[ROUTER].admission.stopping = True
        answer = await router.post(*{**ROUTES, **TEXT_ROUTES}[name])
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert b"the router is shutting down" in answer.body


# ---- Clients -----------------------------------------------------------------------------------

ONE_EACH = {
    "max_concurrent_requests": 100,
    "max_concurrent_requests_per_key": 1,
    "max_queued_requests_per_key": 0,
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """The setting that names a file with the keys "one" and "two"."""
    hashes = {
        name: key_file_format.hash_of(key_file_format.digest_of(name.encode()))
        for name in ("one", "two")
    }
    file = tmp_path / "keys.toml"
    file.write_text("".join(f"[[keys]]\nname = '{n}'\nhash = '{h}'\n" for n, h in hashes.items()))
    return {"api_keys_file": str(file)}


async def test_the_key_that_a_request_shows_says_whose_it_is(
    byte_level: Tokenizer, keys: dict[str, str]
) -> None:
    async with small_router(slow_fleet(byte_level), **ONE_EACH, **keys) as router:
        running = [send(router, headers=bearer("one"), address="127.0.0.1")]
        await until(lambda: router.app[ROUTER].admission.in_flight == 1)
        for headers in ({"Authorization": "bearer one"}, {"x-api-key": "one"}):
            assert (await send(router, headers=headers, address="127.0.0.2")).status == 429
        running += [send(router, headers={"x-api-key": "two"}, address="127.0.0.1")]
        await until(lambda: router.app[ROUTER].admission.in_flight == 2)
        await leave(*running)


@pytest.mark.parametrize(
    ("first", "same", "other"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.2"),
        ("2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1"),
        ("127.0.0.1", "::ffff:127.0.0.1", "::ffff:127.0.0.2"),
        ("fe80::1%eth0", "fe80::2", "fe80:0:0:1::1"),
        ("", "", "127.0.0.1"),
    ],
)
async def test_without_known_keys_an_address_says_whose_a_request_is_whatever_key_it_makes_up(
    byte_level: Tokenizer, first: str, same: str, other: str
) -> None:
    async with small_router(slow_fleet(byte_level), **ONE_EACH) as router:
        running = [send(router, address=first, headers=bearer("made-up-0"))]
        await until(lambda: router.app[ROUTER].admission.in_flight == 1)
        for headers in ({}, bearer("made-up-1"), {"x-api-key": "made-up-2"}):
            assert (await send(router, address=same, headers=headers)).status == 429
        running.append(send(router, address=other))
        await until(lambda: router.app[ROUTER].admission.in_flight == 2)
        await leave(*running)


async def test_shards_get_one_name_for_all_requests_of_a_client_that_says_nothing_of_it(
    byte_level: Tokenizer, keys: dict[str, str]
) -> None:
    fleet = FakeFleet(model_files(byte_level))
    here, elsewhere = "127.0.0.1", "127.0.0.2"
    async with small_router(fleet) as router:
        for address, headers in ((here, {}), (here, bearer("made-up")), (elsewhere, {})):
            await send(router, max_tokens=1, address=address, headers=headers)
    async with small_router(fleet, **keys) as router:
        for address, key in ((here, "one"), (elsewhere, "one"), (here, "two")):
            await send(router, max_tokens=1, address=address, headers=bearer(key))
    first, same, other, one, one_elsewhere, two = (request.caller for request in fleet.requests)
    assert (first, one) == (same, one_elsewhere)
    assert len({first, other, one, two}) == 4
    for client in (here, "one"):
        unkeyed = hashlib.blake2b(client.encode(), digest_size=8).hexdigest()
        assert not {client, unkeyed} & {first, one}


async def test_a_key_is_neither_kept_nor_logged_nor_shown(
    byte_level: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with small_router(slow_fleet(byte_level), max_queued_requests=0) as router:
        running = send(router, headers=bearer("the-secret"))
        await until(lambda: router.app[ROUTER].admission.in_flight == 1)
        refused = await send(router, headers=bearer("the-secret"))
        assert refused.status == 429
        assert "the-secret" not in "".join(router.app[ROUTER].admission._accounts)
        assert b"the-secret" not in refused.body
        assert b"the-secret" not in (await router.get("/metrics")).body
        await leave(running)
    assert "the-secret" not in caplog.text


async def test_polite_clients_are_served_beside_a_greedy_one(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.01, script=lambda request: [5] * 5)
    bounds = {"max_concurrent_requests": 2, "max_queued_requests": 8}
    async with memory_router(fleet, **bounds) as router:
        greedy = [send(router, address="127.0.0.1") for _ in range(30)]
        await asyncio.sleep(0.02)
        polite = [send(router, address=f"127.0.0.{number}") for number in range(2, 7)]
        answers = await asyncio.gather(*polite)
        assert [answer.status for answer in answers] == [200] * 5
        statuses = [answer.status for answer in await asyncio.gather(*greedy)]
        # Two run, and the queue has five of other clients before the last three of its eight.
        assert statuses.count(200) == 5


# ---- Deadlines ---------------------------------------------------------------------------------


def with_timeout(name: str, timeout: object) -> tuple[str, dict[str, Any]]:
    path, body = ROUTES[name]
    if name.startswith("generate"):
        return path, {**body, "parameters": {"timeout": timeout}}
    return path, {**body, "timeout": timeout}


async def ends_at_deadline(byte_level: Tokenizer, name: str, how: str, timeout_s: float) -> bool:
    """Check the answer to a request with this deadline. False if no shard was sent it."""
    fleet = slow_fleet(byte_level)
    fleet.step_s = 30.0
    settings = {"request_timeout_s": timeout_s} if how == "server" else {}
    async with memory_router(fleet, **settings) as router:
        (path, body), headers = ROUTES[name], {}
        if how == "field":
            path, body = with_timeout(name, timeout_s)
        elif how == "header":
            headers = {"x-penstock-timeout-s": str(timeout_s)}
        async with asyncio.timeout(timeout_s + 5):
            answer = await router.post(path, body, **headers)
        assert answer.status == 504
        assert b"took longer than it or this server allows" in answer.body
        if name == "embeddings":
            return True
        await until(lambda: not fleet.running)
        if not fleet.requests:
            return False
        deadline_s = fleet.requests[0].objective.deadline_s
        assert deadline_s is not None
        # What was left when it was sent, and a tenth of a second.
        assert 0.1 < deadline_s < timeout_s + 0.1
        text = (await router.get("/metrics")).body.decode()
        assert 'penstock_router_aborts_total{cause="timeout"} 1.0' in text
        return True


@pytest.mark.parametrize("how", ["field", "header", "server"])
@pytest.mark.parametrize("name", ROUTES)
async def test_a_request_ends_at_its_deadline(byte_level: Tokenizer, name: str, how: str) -> None:
    # A busy machine may not send a request within a tenth of a second.
    for timeout_s in (0.1, 1.0, 4.0):
        if await ends_at_deadline(byte_level, name, how, timeout_s):
            return
    pytest.fail("no request was sent before its deadline")


async def test_a_body_that_does_not_come_in_time_ends_its_request(byte_level: Tokenizer) -> None:
    async with memory_router(FakeFleet(model_files(byte_level))) as router:
        for name in ROUTES:
            connection = router.connect()
            head = f"POST {ROUTES[name][0]} HTTP/1.1\r\nHost: memory\r\nContent-Length: 100\r\n"
            connection.send_raw(f"{head}x-penstock-timeout-s: 0.05\r\n\r\n{{".encode())
            async with asyncio.timeout(5):
                assert (await connection.read_answer()).status == 504
            connection.close()


async def test_work_that_was_left_takes_no_room_from_whoever_is_let_in(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with small_router(fleet, max_queued_requests=0, tokenizer_threads=1) as router:
        begun, end = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            end.wait(5)

        left = asyncio.create_task(router.app[ROUTER].threads.run(work))
        await until(begun.is_set)
        left.cancel()
        # Shown in a thread.
        answer = await router.complete(logprobs=1, max_tokens=1)
        end.set()
        assert answer.status == 200


async def test_the_deadline_of_a_stream_that_has_begun_is_its_last_event(
    byte_level: Tokenizer,
) -> None:
    async with memory_router(slow_fleet(byte_level)) as router:
        # Long enough for the first event, on a busy machine too.
        *_, error, done = (await router.complete(stream=True, timeout=1.0)).events
        assert (error["error"]["code"], done) == (504, "[DONE]")


async def test_a_stream_that_is_taken_up_again_keeps_the_deadline_it_began_with(
    byte_level: Tokenizer,
) -> None:
    async with memory_router(slow_fleet(byte_level), resume_grace_s=30.0) as router:
        headers = {"x-penstock-resumable": "1", "Content-Type": "application/json"}
        body, connection = b'{"prompt": "x", "stream": true}', router.connect()
        connection.send("POST", "/v1/completions", body, {**headers, "x-penstock-timeout-s": "1.0"})
        _, head = await connection.read_head()
        event = await anext(connection.chunks(head))
        last_id = event.decode().partition("id: ")[2].partition("\n")[0]
        connection.close()
        headers |= {"Last-Event-ID": last_id, "x-penstock-timeout-s": "100"}
        async with asyncio.timeout(30):
            answer = await router.request("POST", "/v1/completions", body, headers)
        *_, error, done, _ = answer.body.decode().split("\n\n")
        assert '"code":504' in error
        assert done == "data: [DONE]"


async def test_what_a_stream_s_deadline_is_does_not_depend_on_when_its_sequences_are_sent(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is put down for a slow reader goes on with what is left of its time."""
    monkeypatch.setattr(resumable_streams, "RESERVED_BYTES", 2_000)
    monkeypatch.setattr(resumable_streams, "MAX_WAITING_BYTES", 4_000)
    fleet = FakeFleet(model_files(byte_level), step_s=0.002)
    async with memory_router(fleet) as router:
        connection = router.connect()
        body = b'{"prompt": "x", "stream": true, "max_tokens": 100, "timeout": 100}'
        headers = {"x-penstock-resumable": "1", "Content-Type": "application/json"}
        connection.send("POST", "/v1/completions", body, headers)
        _, head = await connection.read_head()
        connection.stop_reading()
        await until(lambda: not fleet.running)
        await asyncio.sleep(0.2)
        connection.go_on_reading()
        assert b"[DONE]" in b"".join([part async for part in connection.chunks(head)])
        connection.close()
    first, *later = (request.objective.deadline_s or 0 for request in fleet.requests)
    assert later
    assert max(later) < first - 0.2


async def test_a_deadline_ends_waiting_too(byte_level: Tokenizer) -> None:
    fleet = slow_fleet(byte_level)
    async with small_router(fleet) as router:
        running = await fill(router)
        for stream in (False, True):
            assert (await send(router, timeout=0.05, stream=stream)).status == 504
        assert len(fleet.requests) == 1
        await leave(running)


async def test_the_least_of_all_limits_counts(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet, request_timeout_s=300.0) as router:
        for field, header, wanted in ((200, 100, 100), (100, 200, 100), (400, 500, 300)):
            headers = {"x-penstock-timeout-s": f"{header}"}
            assert (await send(router, timeout=field, headers=headers)).status == 200
            deadline_s = fleet.requests[-1].objective.deadline_s
            assert deadline_s is not None
            assert wanted - 5 < deadline_s <= wanted + 0.1


async def test_without_a_limit_shards_are_told_none(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet) as router:
        assert (await router.complete()).status == 200
        assert (await router.complete(timeout=4294967, n=150, max_tokens=1)).status == 200
    assert fleet.requests[0].objective.deadline_s is None
    # As much as the wire has bits for; what the sequences before took is not added.
    told = [request.objective.deadline_s or 0 for request in fleet.requests[1:]]
    assert len(told) == 150
    assert all(4294967 - 5 < deadline_s <= 4294967 for deadline_s in told)


BAD_TIMEOUTS = [0, -1, -0.0, 1e308, 4294968, 5e-324, "5", True, [5], {}]


@pytest.mark.parametrize("name", ROUTES)
async def test_a_timeout_that_is_none_is_refused_by_its_name(
    byte_level: Tokenizer, name: str
) -> None:
    async with memory_router(FakeFleet(model_files(byte_level))) as router:
        for value in BAD_TIMEOUTS:
            answer = await router.post(*with_timeout(name, value))
            assert answer.status == (422 if name.startswith("generate") else 400), value
            text = answer.body.decode()
            assert "timeout: must be " in text
            assert "given: " in text
        for given in (
            "0",
            "-1",
            "nan",
            "NaN",
            "inf",
            "-Infinity",
            "1e308",
            "1e-320",
            "x",
            "",
            "5s",
            "1_0",
            "\u0665",
        ):
            headers = {"x-penstock-timeout-s": given}
            answer = await router.post(*ROUTES[name], **headers)
            assert answer.status == (422 if name.startswith("generate") else 400), given
            assert b"x-penstock-timeout-s: must be " in answer.body
        path, body = with_timeout(name, "HERE")
        for word in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
            data = str(body).replace("'HERE'", word.decode()).replace("'", '"').encode()
            assert (await router.post(path, data)).status in (400, 422)


# ---- no shard ----------------------------------------------------------------------------------


async def test_a_request_is_held_until_a_shard_serves_its_model(fleet: FakeFleet) -> None:
    (shard,) = fleet.shards
    shard.ready = False
    async with memory_router(fleet, shard_wait_s=20.0) as router:
        assert (await router.get("/ready")).status == 200
        asking = asyncio.create_task(router.complete(max_tokens=2))
        held = 'penstock_router_requests_held{model="fake-model"} 1.0'
        while held not in (await router.get("/metrics")).body.decode():
            await asyncio.sleep(0.01)
        assert (
            "penstock_router_sequences_queued 1.0" in (await router.get("/metrics")).body.decode()
        )
        shard.ready = True
        assert (await asking).status == 200
        assert held.replace("1.0", "0.0") in (await router.get("/metrics")).body.decode()


class TellingFleet(FakeFleet):
    """A fleet that changes when `tell` is called."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        self.changed = asyncio.Event()

    async def wait_changed(self) -> None:
        await self.changed.wait()

    def tell(self) -> None:
        self.changed.set()
        self.changed.clear()


async def test_held_requests_look_for_a_shard_when_the_fleet_changed_and_not_before(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    resolve = Models._resolve

    def counted(self: Models, name: str) -> tuple[ShardInfo, str]:
        looked.append(name)
        return resolve(self, name)

    monkeypatch.setattr(Models, "_resolve", counted)
    fleet = TellingFleet(model_files(byte_level))
    fleet.shards[0].ready = False
    async with memory_router(fleet, shard_wait_s=20.0) as router, asyncio.timeout(10):
        asking = [asyncio.create_task(router.complete(max_tokens=2)) for _ in range(5)]
        await until(lambda: len(looked) == 5)
        for looks in (10, 15):
            # Longer than any poll would pause.
            await asyncio.sleep(0.25)
            assert len(looked) == looks - 5
            fleet.tell()
            while len(looked) < looks:
                await asyncio.sleep(0.005)
        asking.pop().cancel()
        fleet.shards[0].ready = True
        fleet.tell()
        for answer in await asyncio.gather(*asking):
            assert answer.status == 200


async def test_a_request_that_no_shard_came_for_is_refused_in_the_end(fleet: FakeFleet) -> None:
    fleet.shards[0].ready = False
    async with memory_router(fleet, shard_wait_s=0.2) as router:
        refused = await router.complete(max_tokens=2)
        assert refused.status == 503
        assert "no shard serves" in refused.error["message"]
        # One with less time ends sooner, by that.
        refused = await router.complete(max_tokens=2, timeout=0.05)
        assert refused.status == 504


async def test_requests_that_are_held_take_room_in_the_queue(fleet: FakeFleet) -> None:
    fleet.shards[0].ready = False
    settings = {"max_concurrent_requests": 1, "max_queued_requests": 1}
    async with memory_router(fleet, shard_wait_s=1.0, **settings) as router:
        answers = await asyncio.gather(*(router.complete(max_tokens=2) for _ in range(4)))
        assert sorted(answer.status for answer in answers) == [429, 429, 503, 503]


async def test_who_asks_for_the_tokenizer_of_a_model_that_is_away_takes_room_and_time_too(
    fleet: FakeFleet,
) -> None:
    fleet.shards[0].ready = False
    settings = {"max_concurrent_requests": 1, "max_queued_requests": 1}
    async with memory_router(fleet, shard_wait_s=1.0, **settings) as router:
        answers = await asyncio.gather(*(router.get("/tokenizer_info") for _ in range(4)))
        assert sorted(answer.status for answer in answers) == [429, 429, 503, 503]
        late = await router.get("/tokenizer_info", **{"x-penstock-timeout-s": "0.05"})
        assert late.status == 504


async def test_a_model_that_is_expected_is_away_and_not_unknown(fleet: FakeFleet) -> None:
    body = {"prompt": "Hello", "max_tokens": 2, "model": "qwen"}
    async with memory_router(fleet) as router:
        assert (await router.post("/v1/completions", body)).status == 404
    async with memory_router(fleet, expected_models=("qwen",)) as router:
        assert (await router.post("/v1/completions", body)).status == 503
