"""The console's files and its feed, without a browser: who gets them, and what they say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.router_doubles import (
    Connection,
    FakeFleet,
    FakeShard,
    MemoryRouter,
    byte_level_tokenizer,
    memory_router,
    model_files,
)

from penstock_proto.facts import LoadReport
from penstock_proto.types import AttemptRecord
from penstock_router.console import feed as console
from penstock_router.console.feed import StepRates, describe_request
from penstock_router.observe.request_record import RequestRecord
from penstock_router.routes.console import CONSOLE
from penstock_router.server.parts import ROUTER

SECRET = "the weather in Atlantis"


class Watcher:
    """A reader of the console's feed."""

    def __init__(self, connection: Connection, headers: dict[str, str] | None = None) -> None:
        self.connection = connection
        self._headers = headers or {}
        self._events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> int:
        self.connection.send("GET", "/console/feed", b"", self._headers)
        status, headers = await self.connection.read_head()
        self._task = asyncio.create_task(self._read(headers))
        return status

    async def _read(self, headers: dict[str, str]) -> None:
        async for chunk in self.connection.chunks(headers):
            for frame in chunk.decode().split("\n\n"):
                if frame.startswith("event: "):
                    event, data = frame.split("\n")
                    name = event.removeprefix("event: ")
                    await self._events.put((name, json.loads(data.removeprefix("data: "))))
        await self._events.put(("end", None))

    async def next(self, name: str) -> Any:
        """Return the data of the next event of this name."""
        async with asyncio.timeout(30):
            while True:
                event, data = await self._events.get()
                if event == name:
                    return data

    async def leave(self) -> None:
        self.connection.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def watching(router: MemoryRouter) -> AsyncIterator[Watcher]:
    watcher = Watcher(router.connect())
    try:
        assert await watcher.begin() == 200
        yield watcher
    finally:
        await watcher.leave()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(console, "_TELL_EVERY_S", 0.03)


def new_record(request_id: str) -> RequestRecord:
    return RequestRecord(
        request_id=request_id, method="POST", route="/v1/completions", arrived_s=0.0
    )


def fleet() -> FakeFleet:
    return FakeFleet(model_files(byte_level_tokenizer()))


# ---- files -------------------------------------------------------------------------------------


async def test_the_page_may_load_nothing_that_is_not_this_router_s() -> None:
    async with memory_router(fleet()) as router:
        answer = await router.get("/")
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        page = answer.body.decode()
        assert "http:" not in page
        assert "https:" not in page
        assert "<style" not in page
        assert " style=" not in page
        assert " onclick" not in page


async def test_every_file_that_the_page_names_is_there() -> None:
    async with memory_router(fleet()) as router:
        page = (await router.get("/")).body.decode()
        names = {part.partition('"')[0] for part in page.split('"console/')[1:]}
        assert {"main.js", "base.css", "icon.svg"} <= names
        for name in names:
            answer = await router.get(f"/console/{name}")
            assert (answer.status, answer.headers["x-content-type-options"]) == (200, "nosniff")


async def test_a_file_that_a_browser_has_is_not_sent_again() -> None:
    async with memory_router(fleet()) as router:
        first = await router.get("/console/main.js")
        assert first.headers["content-type"] == "text/javascript; charset=utf-8"
        assert first.headers["cache-control"] == "no-cache"
        again = await router.get("/console/main.js", **{"If-None-Match": first.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
        other = await router.get("/console/main.js", **{"If-None-Match": '"other"'})
        assert (other.status, other.body) == (200, first.body)


@pytest.mark.parametrize(
    "path",
    [
        *("/console/nothing.js", "/console/../docs.html", "/console/..%2fdocs.html"),
        *("/console/%2e%2e%2f%2e%2e%2fapp.py", "/console/", "/console//etc/passwd"),
        *("/console/main.js%00.css", "/console/console/main.js", "/console/.."),
    ],
)
async def test_no_other_path_leads_to_a_file(path: str) -> None:
    async with memory_router(fleet()) as router:
        assert (await router.get(path)).status == 404


async def test_without_a_console_the_root_is_a_probe_and_the_rest_is_closed() -> None:
    async with memory_router(fleet(), console=False) as router:
        answer = await router.get("/")
        assert (answer.status, answer.body) == (200, b"")
        assert (await router.get("/console/main.js")).status == 404
        assert (await router.get("/console/feed")).status == 404


# ---- the feed ----------------------------------------------------------------------------------


async def test_a_watcher_is_told_of_the_fleet_at_once() -> None:
    shards = [
        FakeShard(load=LoadReport("one", running=3, waiting=2, num_blocks=100, serving=True)),
        FakeShard(address="fake:2", info=None, ready=False, connected=False, problem="gone away"),
        FakeShard(address="fake:3", ready=False, load=LoadReport("three")),
        FakeShard(address="fake:4", ready=False, load=LoadReport("four", draining=True)),
    ]
    async with (
        memory_router(replace(fleet(), members=shards), workers=4, worker=2) as router,
        watching(router) as watcher,
    ):
        seen = await watcher.next("fleet")
        assert (seen["worker"], seen["workers"]) == (2, 4)
        assert seen["router"]["followed"] == console._MAX_RUNNING
        assert [shard["state"] for shard in seen["shards"]] == [
            *("serving", "gone", "loading", "draining")
        ]
        first, second = seen["shards"][:2]
        assert (first["running"], first["max_num_seqs"], first["waiting"]) == (3, 16, 2)
        assert (second["problem"], second["model"]) == ("gone away", None)


@pytest.mark.usefixtures("quick")
async def test_a_watcher_hears_of_a_request_from_its_tokens_to_its_end() -> None:
    async with memory_router(replace(fleet(), step_s=0.02)) as router, watching(router) as watcher:
        assert await watcher.next("requests") == []
        asked = router.post(
            "/v1/completions", {"prompt": SECRET, "max_tokens": 10}, **{"X-Request-Id": "mine"}
        )
        answer = asyncio.create_task(asked)
        seen: list[dict[str, Any]] = []
        while not seen or seen[-1]["ended_at"] is None:
            seen += await watcher.next("requests")
        assert (await answer).status == 200
        assert {record["id"] for record in seen} == {"mine"}
        tokens = [record["output_tokens"] for record in seen]
        assert tokens == sorted(tokens)
        assert len(set(tokens)) > 2
        last = seen[-1]
        assert (last["outcome"], last["status"], last["output_tokens"]) == ("length", 200, 10)
        assert last["arrived_at"] <= last["placed_at"] <= last["first_token_at"] < last["ended_at"]
        assert SECRET not in json.dumps(seen)


@pytest.mark.usefixtures("quick")
async def test_who_comes_later_is_told_of_what_was_but_not_of_reads_and_probes() -> None:
    async with memory_router(fleet()) as router:
        assert (await router.complete("Hello", max_tokens=2)).status == 200
        assert (await router.complete("Hello", max_tokens=-2)).status == 400
        assert (await router.get("/health")).status == 200
        assert (await router.get("/v1/models")).status == 200
        async with watching(router) as watcher:
            seen = await watcher.next("requests")
            assert [record["status"] for record in seen] == [200, 400]


async def test_the_end_of_a_request_that_was_shown_is_told_however_many_end_beside_it() -> None:
    async with memory_router(fleet()) as router:
        looks, records = router.app[CONSOLE], router.app[ROUTER].records
        shown = new_record("shown")
        with looks.watched():
            with records.track(shown):
                looks._news(0.0)
            for number in range(2 * console._MAX_ENDED):
                with records.track(new_record(f"refused-{number}")):
                    pass
            frame = looks._news(0.25).decode()
        told = json.loads(frame.split("event: requests\ndata: ")[1])
        assert [each["ended_at"] is not None for each in told if each["id"] == "shown"] == [True]


@pytest.mark.usefixtures("quick")
async def test_a_fleet_at_rest_is_still_told_of_and_nobody_looks_when_nobody_watches() -> None:
    async with memory_router(fleet()) as router:
        looks = router.app[CONSOLE]
        async with watching(router) as watcher:
            for _ in range(3):
                await watcher.next("fleet")
            assert looks._task is not None
        async with asyncio.timeout(30):
            while looks._task is not None:
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("quick")
async def test_a_watcher_who_reads_nothing_is_let_go_and_the_others_go_on() -> None:
    async with memory_router(fleet()) as router, watching(router) as good:
        stuck = router.app[CONSOLE].watched()
        with stuck as frames:
            async with asyncio.timeout(30):
                while (await frames.get()) is not None:
                    # So slow that looks go by.
                    await asyncio.sleep(0.06 * console._MAX_FRAMES_BEHIND)
                    break
                while frames.qsize() != 1 or frames.get_nowait() is not None:
                    await asyncio.sleep(0.01)
        await good.next("fleet")


async def test_there_is_an_end_to_how_many_may_watch() -> None:
    async with memory_router(fleet()) as router:
        watchers = [Watcher(router.connect()) for _ in range(console.MAX_WATCHERS)]
        assert [await watcher.begin() for watcher in watchers] == [200] * len(watchers)
        assert (await router.get("/console/feed")).status == 429
        await watchers.pop().leave()
        async with asyncio.timeout(30):
            while len(router.app[CONSOLE]._watchers) == console.MAX_WATCHERS:
                await asyncio.sleep(0.01)
        async with watching(router):
            pass
        for watcher in watchers:
            await watcher.leave()


async def test_the_feed_ends_at_once_when_the_router_stops() -> None:
    async with memory_router(fleet(), shutdown_timeout_s=30.0) as router:
        watcher = Watcher(router.connect())
        await watcher.begin()
        await watcher.next("fleet")
        # As SIGTERM does.
        async with asyncio.timeout(15):
            await router.app.shutdown()
        await watcher.next("end")
        await watcher.leave()


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({}, None, 200),
        ({"api_key": "users"}, None, 403),
        ({"api_key": "users"}, "users", 403),
        ({"admin_key": "boss"}, None, 401),
        ({"api_key": "users", "admin_key": "boss"}, "wrong", 401),
        ({"api_key": "users", "admin_key": "boss"}, "users", 403),
        ({"api_key": "users", "admin_key": "boss"}, "boss", 200),
    ],
)
async def test_where_there_are_keys_the_feed_is_the_operator_s(
    settings: dict[str, str], key: str | None, status: int
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with memory_router(fleet(), **settings) as router:
        connection = router.connect()
        connection.send("GET", "/console/feed", b"", headers)
        assert (await connection.read_head())[0] == status
        connection.close()
        # The files say nothing of this router.
        assert (await router.get("/")).status == 200


@pytest.mark.usefixtures("quick")
async def test_the_feed_of_a_key_that_is_revoked_ends() -> None:
    async with memory_router(fleet(), admin_key="boss") as router:
        watcher = Watcher(router.connect(), {"Authorization": "Bearer boss"})
        assert await watcher.begin() == 200
        await watcher.next("fleet")
        # As when the file of keys is read again without it.
        router.app[ROUTER].keys._by_digest = {}
        await watcher.next("end")
        await watcher.leave()


# ---- what it is made of ------------------------------------------------------------------------


def test_rates_are_of_the_last_second_and_of_one_engine() -> None:
    shard, rates = FakeShard(load=LoadReport("one", steps_total=100)), StepRates()
    assert rates.look(shard, 10.0) == (None, None)
    shard.load = LoadReport("one", steps_total=105, steps_seconds_total=0.2)
    assert rates.look(shard, 10.25) == (20.0, 0.04)
    for now_s in (10.5, 10.75, 11.0, 11.25):
        rates.look(shard, now_s)
    assert rates.look(shard, 11.5) == (0.0, None)
    # Started anew, it counts from the beginning.
    shard.load = LoadReport("two", steps_total=3, steps_seconds_total=0.1)
    assert rates.look(shard, 12.25) == (None, None)
    shard.load = LoadReport("two", steps_total=8, steps_seconds_total=0.2)
    rates.forget_others([shard.address])
    assert rates.look(shard, 13.25) == (5.0, 0.02)
    rates.forget_others([])
    assert rates.look(shard, 14.25) == (None, None)


def test_a_request_s_times_are_unix_times_and_its_attempts_are_in_order() -> None:
    record = RequestRecord(
        request_id="r", method="POST", route="/v1/completions", arrived_s=50.0, arrived_at=1000.0
    )
    record.placed_s, record.first_token_s = 50.5, 51.0
    record.follow(
        [
            AttemptRecord("a:1", "least_load", 50.5, 51.0, 52.0, "unavailable"),
            AttemptRecord("b:2", "continued", 52.25),
        ]
    )
    shown = describe_request(record)
    assert (shown["arrived_at"], shown["placed_at"], shown["ended_at"]) == (1000.0, 1000.5, None)
    first, second = shown["attempts"]
    assert (first["shard"], first["ended_at"], first["ended_because"]) == (
        *("a:1", 1002.0),
        "unavailable",
    )
    assert (second["sent_at"], second["first_token_at"]) == (1002.25, None)
