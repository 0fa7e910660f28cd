"""Responses that are kept: what comes back, what bounds them, what workers know of each other."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from support.budget import budget, seeded

from penstock_router.store import response_store
from penstock_router.store.response_store import (
    MIN_BYTES,
    ResponseStore,
    ResponseTooLarge,
    StoredResponse,
    StoreUnavailable,
    StoreUnusable,
    store_file,
)

TTL_S = 100.0
# So long that no store beats by itself during a test: those that need beats ask for them.
SILENT_S = 1000.0
LARGE_BYTES = 64 * MIN_BYTES


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "responses.sqlite")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_store(path: str, owner: str = "a", **changes: Any) -> ResponseStore:
    given = {"max_bytes": LARGE_BYTES, "ttl_s": TTL_S, "silent_s": SILENT_S, **changes}
    return ResponseStore(path, owner=owner, **given)


@pytest.fixture
async def store(path: str, clock: Clock) -> AsyncIterator[ResponseStore]:
    async with make_store(path, clock=clock) as opened:
        yield opened


@pytest.fixture
async def other(store: ResponseStore, path: str, clock: Clock) -> AsyncIterator[ResponseStore]:
    """Another worker's, of the same file."""
    async with make_store(path, "b", clock=clock) as opened:
        yield opened


async def put(store: ResponseStore, *ids: str, status: str = "completed", size: int = 10) -> None:
    for response_id in ids:
        await store.put(response_id, response_id.encode() * size, b"[]", status=status)


async def kept(store: ResponseStore, *ids: str) -> list[str]:
    return [response_id for response_id in ids if await store.get(response_id) is not None]


async def status_of(store: ResponseStore, response_id: str) -> str | None:
    found = await store.get(response_id)
    return None if found is None else found.status


def bytes_on_disk(path: str) -> int:
    """Return the size of the file and of the files that SQLite keeps beside it."""
    return sum(file.stat().st_size for file in Path(path).parent.iterdir())


def file_bytes(path: str) -> int:
    return os.path.getsize(path)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Somebody else is writing."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


# ---- what comes back -----------------------------------------------------------------------------


async def test_every_worker_gets_what_one_has_put(
    store: ResponseStore, other: ResponseStore
) -> None:
    await store.put("resp_1", b'{"id": 1}', b"[1]", status="completed")
    assert await other.get("resp_1") == StoredResponse(b'{"id": 1}', b"[1]", "completed")
    assert await other.get("resp_2") is None


async def test_a_second_put_replaces_the_first(store: ResponseStore, other: ResponseStore) -> None:
    await store.put("resp_1", b"", b"[]", status="in_progress")
    await other.put("resp_1", b"end", b"[1]", status="incomplete")
    assert await store.get("resp_1") == StoredResponse(b"end", b"[1]", "incomplete")


async def test_what_is_deleted_is_gone_and_is_deleted_once(store: ResponseStore) -> None:
    await put(store, "resp_1", "resp_2")
    assert await store.delete("resp_1")
    assert not await store.delete("resp_1")
    assert await kept(store, "resp_1", "resp_2") == ["resp_2"]


async def test_an_id_may_be_any_text(store: ResponseStore) -> None:
    ids = ["", "'", '"; DROP TABLE responses; --', "%", "_", "a%b", "ü🎈", "u\u0308", "a\0b", "a"]
    ids += ["\ud800", "x" * 100_000, "A"]
    for number, response_id in enumerate(ids):
        await store.put(response_id, str(number).encode(), b"", status="queued")
    for number, response_id in enumerate(ids):
        assert await store.get(response_id) == StoredResponse(str(number).encode(), b"", "queued")
        assert await store.request_cancel(response_id)
        assert await store.cancel_requested(ids) == {*ids[: number + 1]}
        assert await store.delete(response_id)
        await store.put(response_id, b"", b"", status="completed")


async def test_what_was_put_is_there_after_a_restart(path: str) -> None:
    async with make_store(path) as store:
        await put(store, "resp_1")
    with store_file(path, max_bytes=LARGE_BYTES):
        async with make_store(path) as store:
            assert await status_of(store, "resp_1") == "completed"


async def test_what_was_asked_for_is_done_though_the_task_that_asked_is_cancelled(
    store: ResponseStore, path: str
) -> None:
    with locked(path):
        asking = asyncio.create_task(put(store, "resp_1"))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
    assert await status_of(store, "resp_1") == "completed"


async def test_two_workers_tell_what_a_table_in_memory_would(
    store: ResponseStore, other: ResponseStore
) -> None:
    rng = seeded("responses of two workers")
    expected: dict[str, StoredResponse] = {}
    for _ in range(budget(300, 20_000)):
        worker, name = rng.choice([store, other]), f"resp_{rng.randrange(8)}"
        match rng.randrange(4):
            case 0 | 1:
                new = StoredResponse(
                    rng.randbytes(rng.randrange(9000)), rng.randbytes(3), "completed"
                )
                await worker.put(name, new.response, new.messages, status=new.status)
                expected[name] = new
            case 2:
                assert await worker.delete(name) == (expected.pop(name, None) is not None)
            case _:
                assert not await worker.request_cancel(name)
        assert await rng.choice([store, other]).get(name) == expected.get(name)


# ---- time ----------------------------------------------------------------------------------------


async def test_a_response_is_absent_once_its_time_is_up(
    store: ResponseStore, clock: Clock, path: str
) -> None:
    await put(store, "old", size=100_000)
    clock.now_s += TTL_S - 1
    await put(store, "new")
    assert await kept(store, "old", "new") == ["old", "new"]
    clock.now_s += 1.1
    assert await kept(store, "old", "new") == ["new"]
    assert not await store.delete("old")
    await store.beat()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT id FROM responses").fetchall() == [(b"new",)]


async def test_what_is_being_made_does_not_expire(store: ResponseStore, clock: Clock) -> None:
    await put(store, "resp_1", status="in_progress")
    clock.now_s += 2 * TTL_S
    await store.beat()
    assert await status_of(store, "resp_1") == "in_progress"


async def test_what_expired_is_cleared_away_at_the_start(path: str, clock: Clock) -> None:
    async with make_store(path, clock=clock) as store:
        await put(store, "resp_1")
    clock.now_s += 2 * TTL_S
    async with make_store(path, clock=clock):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT count(*) FROM responses").fetchone() == (0,)


# ---- bytes ---------------------------------------------------------------------------------------


async def test_the_oldest_finished_are_evicted_first(path: str, clock: Clock) -> None:
    async with make_store(path, max_bytes=MIN_BYTES, clock=clock) as store:
        await put(store, "running", status="in_progress", size=10_000)
        first, *rest = [f"{number:05}" for number in range(25)]
        await put(store, first, *rest[:10], size=10_000)
        # Again: it is no longer the oldest.
        await put(store, first, size=10_000)
        await put(store, *rest[10:], size=10_000)
        by_age = [*rest[:10], first, *rest[10:]]
        left = await kept(store, *by_age)
        assert first in left
        assert len(left) < 20
        assert left == by_age[-len(left) :]
        assert await status_of(store, "running") == "in_progress"


async def test_what_is_being_made_is_evicted_where_there_is_nothing_else(
    path: str, clock: Clock
) -> None:
    async with make_store(path, max_bytes=MIN_BYTES, clock=clock) as store:
        ids = [f"{number:05}" for number in range(30)]
        await put(store, "done", size=10_000)
        await put(store, *ids, status="in_progress", size=10_000)
        left = await kept(store, "done", *ids)
        assert len(left) > 12
        assert left == ids[-len(left) :]
        # What has just come is not what goes, though it is the one that is finished.
        await put(store, "done", size=10_000)
        first, *rest = await kept(store, "done", *ids)
        assert first == "done"
        assert rest == left[-len(rest) :]


async def test_who_stores_most_pushes_out_its_own_whichever_worker_it_asks(
    path: str, clock: Clock
) -> None:
    async with (
        make_store(path, max_bytes=MIN_BYTES, clock=clock) as store,
        make_store(path, "b", max_bytes=MIN_BYTES, clock=clock) as other,
    ):
        mine = [f"mine {number}" for number in range(10)]
        running = "mine, being made"
        for name in mine:
            await store.put(name, bytes(10_000), b"", status="completed", key_name="alice")
        await store.put(running, bytes(10_000), b"", status="in_progress", key_name="alice")
        for number in range(200):
            worker = (store, other)[number % 2]
            await worker.put(f"{number}", bytes(20_000), b"", status="completed", key_name="bob")
        assert await kept(store, *mine, running) == [*mine, running]
        # Bob has the rest, and of his own the latest.
        left = await kept(store, *(f"{number}" for number in range(200)))
        assert len(left) > 30
        assert left == [f"{number}" for number in range(200 - len(left), 200)]
        # Who had little is evicted no sooner than it holds most.
        for number in range(100):
            name = f"more {number}"
            await store.put(name, bytes(10_000), b"", status="completed", key_name="alice")
        assert 0.3 < dict(_holders(path))["alice"] / MIN_BYTES < 0.6
    assert _holders(path) == _sums(path)


async def test_what_is_counted_for_each_key_is_what_it_holds(path: str, clock: Clock) -> None:
    rng = seeded("what keys hold")
    async with make_store(path, max_bytes=MIN_BYTES, clock=clock, ttl_s=50) as store:
        for _ in range(budget(300, 5000)):
            name = f"{rng.randrange(40)}"
            clock.now_s += rng.random()
            status = rng.choice(["completed", "in_progress"])
            if rng.random() < 0.7:
                size = rng.choice([0, 100, 40_000])
                key_name = rng.choice(["", "alice", "bob"])
                await store.put(name, bytes(size), b"x", status=status, key_name=key_name)
            else:
                await store.delete(name)
            if rng.random() < 0.1:
                await store.beat()
            assert _holders(path) == _sums(path)


def _holders(path: str) -> list[tuple[str, int]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT * FROM holders ORDER BY key_name").fetchall()


def _sums(path: str) -> list[tuple[str, int]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(
            "SELECT key_name, sum(512 + length(response) + length(messages))"
            " FROM responses GROUP BY key_name ORDER BY key_name"
        ).fetchall()


async def test_one_put_makes_room_for_all_of_itself(path: str, clock: Clock) -> None:
    async with make_store(path, max_bytes=MIN_BYTES, clock=clock) as store:
        ids = [f"{number:04}" for number in range(200)]
        await put(store, *ids, size=1000)
        await store.put("large", bytes(MIN_BYTES // 4 - 5), b"", status="completed")
        left = await kept(store, *ids)
        assert await kept(store, "large") == ["large"]
        assert 100 < len(left) < 200
        assert left == ids[-len(left) :]


async def test_a_document_of_more_than_a_quarter_of_the_store_is_refused(path: str) -> None:
    async with make_store(path, max_bytes=MIN_BYTES) as store:
        largest = MIN_BYTES // 4 - len("resp_1")
        await store.put("resp_1", bytes(largest - 10), bytes(10), status="completed")
        with pytest.raises(ResponseTooLarge, match=r"262145 bytes; at most 262144 can be stored"):
            await store.put("resp_1", bytes(largest - 10), bytes(11), status="failed")
        assert await status_of(store, "resp_1") == "completed"


async def test_the_file_stays_within_its_bound_whatever_the_sizes(path: str) -> None:
    rng = seeded("sizes of responses")
    max_bytes = 2 * MIN_BYTES
    wal_bytes = 1000 * 4096 + 2 * max_bytes // 4
    async with make_store(path, max_bytes=max_bytes) as store:
        for number in range(budget(600, 20_000)):
            size = rng.choice([10, 2100, 4100, 60_000, max_bytes // 4 - 100])
            await store.put(f"{number}", bytes(rng.randrange(size)), b"", status="completed")
            assert file_bytes(path) <= max_bytes * 1.25
            assert bytes_on_disk(path) <= max_bytes * 1.25 + wal_bytes + 1024 * 1024
        assert await kept(store, f"{number}") == [f"{number}"]
    assert max_bytes / 2 < file_bytes(path) == bytes_on_disk(path)


async def test_the_log_beside_the_file_shrinks_once_nobody_reads_an_old_state(
    store: ResponseStore, path: str
) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM responses").fetchone()
        await put(store, *"abcdefghij", size=1_000_000)
        assert file_bytes(path + "-wal") > 8_000_000
    await put(store, "k")
    assert file_bytes(path + "-wal") < 1_000_000
    assert await kept(store, *"abcdefghijk") == [*"abcdefghijk"]


async def test_a_file_shrinks_when_its_bound_is_lowered(path: str, clock: Clock) -> None:
    async with make_store(path, clock=clock) as store:
        await put(store, *(f"{number:04}" for number in range(100)), size=20_000)
    assert file_bytes(path) > 8_000_000
    with store_file(path, max_bytes=MIN_BYTES):
        assert file_bytes(path) <= MIN_BYTES * 1.25
        async with make_store(path, max_bytes=MIN_BYTES, clock=clock) as store:
            assert await kept(store, "0000", "0099") == ["0099"]


def test_a_store_that_is_too_small_for_anything_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="max_bytes 1048575 is below 1048576"):
        make_store(path, max_bytes=MIN_BYTES - 1)


# ---- workers that come and go --------------------------------------------------------------------


async def test_what_a_silent_worker_was_making_has_failed(path: str) -> None:
    silent_clock, clock = Clock(), Clock()
    async with (
        make_store(path, "silent", ttl_s=1e6, clock=silent_clock) as silent,
        make_store(path, "live", ttl_s=1e6, clock=clock) as live,
    ):
        await put(silent, "queued", status="queued")
        await put(silent, "running", status="in_progress")
        await put(silent, "done")
        await put(live, "mine", status="in_progress")
        for _ in range(3):
            clock.now_s += 0.3 * SILENT_S
            await live.beat()
        ids = ("queued", "running", "done", "mine")
        before = [await status_of(live, response_id) for response_id in ids]
        assert before == ["queued", "in_progress", "completed", "in_progress"]
        clock.now_s += 0.3 * SILENT_S
        await live.beat()
        after = [await status_of(live, response_id) for response_id in ids]
        assert after == ["failed", "failed", "completed", "in_progress"]
        assert not await live.request_cancel("running")
        # It was not dead after all.
        await put(silent, "running")
        assert await status_of(live, "running") == "completed"


async def test_after_a_step_of_the_clock_nobody_is_taken_for_dead(
    store: ResponseStore, other: ResponseStore, clock: Clock
) -> None:
    await put(store, "resp_1", status="in_progress")
    for step_s in (10 * SILENT_S, -20 * SILENT_S):
        clock.now_s += step_s
        for _ in range(3):
            await other.beat()
            await store.beat()
        assert await status_of(other, "resp_1") == "in_progress"


async def test_what_a_worker_had_not_finished_when_it_ended_has_failed(path: str) -> None:
    async with make_store(path, "a") as store:
        async with make_store(path, "b") as other:
            await put(other, "running", status="in_progress")
            await put(other, "done")
            assert await status_of(store, "running") == "in_progress"
        assert await status_of(store, "running") == "failed"
        assert await status_of(store, "done") == "completed"


CHILD = """
import asyncio, sys
from penstock_router.store.response_store import ResponseStore

async def main():
    store = ResponseStore(sys.argv[1], max_bytes=2**22, ttl_s=100, owner="child")
    await store.open()
    await store.put("resp_1", b"{}", b"[]", status="in_progress")
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@contextlib.contextmanager
def killed_worker(path: str) -> Iterator[Callable[[], None]]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE)

    def kill() -> None:
        child.send_signal(signal.SIGKILL)
        child.wait()

    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield kill
        kill()


async def test_what_a_killed_worker_was_making_fails_by_itself(path: str) -> None:
    async with make_store(path, silent_s=0.5) as store:
        with killed_worker(path) as kill:
            assert await status_of(store, "resp_1") == "in_progress"
            kill()
            async with asyncio.timeout(20):
                while await status_of(store, "resp_1") != "failed":
                    await asyncio.sleep(0.02)


async def test_a_worker_of_the_same_name_does_not_take_over_what_a_dead_one_was_making(
    path: str,
) -> None:
    with killed_worker(path) as kill:
        kill()
        async with make_store(path, "child") as store:
            assert await status_of(store, "resp_1") == "failed"


# ---- cancelling ----------------------------------------------------------------------------------


async def test_the_worker_that_makes_a_response_hears_that_it_should_stop(
    store: ResponseStore, other: ResponseStore
) -> None:
    await put(store, "resp_1", "resp_2", status="in_progress")
    assert await store.cancel_requested(["resp_1", "resp_2"]) == set()
    assert await other.request_cancel("resp_1")
    assert await other.request_cancel("resp_1")
    # What it said before it heard does not make it forget.
    await put(store, "resp_1", status="in_progress")
    assert await store.cancel_requested(["resp_1", "resp_2"]) == {"resp_1"}
    assert await store.cancel_requested([]) == set()
    assert await other.cancel_requested(["resp_1"]) == set()
    await put(store, "resp_1", status="cancelled")
    assert await store.cancel_requested(["resp_1"]) == set()
    assert await status_of(other, "resp_1") == "cancelled"


async def test_what_nobody_is_making_cannot_be_cancelled(store: ResponseStore) -> None:
    await put(store, "done")
    assert not await store.request_cancel("done")
    assert not await store.request_cancel("unknown")


async def test_what_is_deleted_while_it_is_made_is_cancelled_and_does_not_come_back(
    store: ResponseStore, other: ResponseStore
) -> None:
    await put(store, "resp_1", status="in_progress")
    assert await other.delete("resp_1")
    assert await store.cancel_requested(["resp_1"]) == {"resp_1"}
    for status in ("in_progress", "completed"):
        await put(store, "resp_1", status=status)
        assert await other.get("resp_1") is None
        assert not await other.delete("resp_1")
        assert not await other.request_cancel("resp_1")


# ---- several processes ---------------------------------------------------------------------------

WRITERS = 4
PUTS = 200


def write(path: str, max_bytes: int, owner: str, together: Barrier) -> None:
    async def main() -> None:
        async with make_store(path, owner, max_bytes=max_bytes) as store:
            together.wait(30)
            for number in range(PUTS):
                name = f"{owner}-{number}"
                await store.put(name, name.encode() * 500, b"[]", status="completed")

    asyncio.run(main())


def write_at_once(path: str, max_bytes: int) -> list[str]:
    """Four processes that put 200 responses each; the ids of all."""
    context = multiprocessing.get_context("spawn")
    owners = [f"writer{number}" for number in range(WRITERS)]
    together = context.Barrier(WRITERS)
    writers = [
        context.Process(target=write, args=(path, max_bytes, owner, together)) for owner in owners
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    return [f"{owner}-{number}" for owner in owners for number in range(PUTS)]


async def test_nothing_is_lost_where_several_processes_write_at_once(path: str) -> None:
    with store_file(path, max_bytes=LARGE_BYTES):
        ids = await asyncio.to_thread(write_at_once, path, LARGE_BYTES)
        async with make_store(path) as store:
            assert await kept(store, *ids) == ids
            for name in ids[::50]:
                assert await store.get(name) == StoredResponse(
                    name.encode() * 500, b"[]", "completed"
                )


async def test_several_processes_keep_to_the_bound_together(path: str) -> None:
    with store_file(path, max_bytes=MIN_BYTES):
        ids = await asyncio.to_thread(write_at_once, path, MIN_BYTES)
        async with make_store(path, max_bytes=MIN_BYTES) as store:
            # Of some 5 kB each, and a page takes 4.
            assert 120 < len(await kept(store, *ids)) < 200
        # Two that close at once may both leave the log to the other: whoever is alone removes it.
        assert bytes_on_disk(path) == file_bytes(path) <= MIN_BYTES * 1.25


# ---- the event loop ------------------------------------------------------------------------------


async def longest_lag_s(until: asyncio.Future[Any]) -> float:
    longest_s = 0.0
    while not until.done():
        before_s = time.perf_counter()
        await asyncio.sleep(0.002)
        longest_s = max(longest_s, time.perf_counter() - before_s)
    return longest_s


async def test_the_event_loop_goes_on_while_a_large_response_waits_for_the_disk(
    store: ResponseStore, path: str
) -> None:
    document = bytes(10_000_000)
    with locked(path):
        putting = asyncio.create_task(store.put("large", document, b"", status="completed"))
        asyncio.get_running_loop().call_later(2.0, putting.cancel)
        # On the loop it would be all of this; here it is a copy, which needs the interpreter.
        assert await longest_lag_s(putting) < 1.0
    reading = asyncio.create_task(store.get("large"))
    assert await longest_lag_s(reading) < 1.0
    assert await reading == StoredResponse(document, b"", "completed")


async def test_a_store_that_is_locked_for_too_long_says_so(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "_BUSY_TIMEOUT_S", 0.05)
    failures: list[None] = []
    async with make_store(path, on_failure=lambda: failures.append(None)) as store:
        with locked(path):
            with pytest.raises(StoreUnavailable, match=r"responses.sqlite: database is locked$"):
                await put(store, "resp_1")
            # Who only reads waits for nobody.
            assert await store.get("resp_1") is None
        await put(store, "resp_1")
        assert await kept(store, "resp_1") == ["resp_1"]
    assert len(failures) == 1


async def test_no_more_calls_wait_for_the_disk_than_there_is_room_for(
    store: ResponseStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "_MAX_QUEUED", 3)
    with locked(path):
        waiting = [asyncio.create_task(put(store, f"resp_{number}")) for number in range(3)]
        await asyncio.sleep(0)
        # Who gives up waiting leaves work behind.
        waiting[2].cancel()
        await asyncio.sleep(0.05)
        with pytest.raises(StoreUnavailable, match="3 calls wait for it"):
            await put(store, "resp_4")
    await asyncio.wait(waiting)
    assert await kept(store, "resp_0", "resp_1", "resp_2", "resp_4") == [
        "resp_0",
        "resp_1",
        "resp_2",
    ]


async def test_a_beat_that_fails_is_logged_and_the_next_is_tried(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(response_store, "_BUSY_TIMEOUT_S", 0.01)
    async with make_store(path, silent_s=0.1):
        async with asyncio.timeout(20):
            with locked(path):
                while not caplog.records:
                    await asyncio.sleep(0.01)
            assert "database is locked" in caplog.text
            before = last_beat(path)
            while last_beat(path) == before:
                await asyncio.sleep(0.01)


def last_beat(path: str) -> float:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return float(connection.execute("SELECT beat_s FROM owners").fetchone()[0])


# ---- the file ------------------------------------------------------------------------------------


async def test_a_response_is_there_for_its_key_and_for_those_who_may_read_all(
    store: ResponseStore, other: ResponseStore
) -> None:
    for name, status in (("done", "completed"), ("running", "in_progress")):
        await store.put(name, b"", b"", status=status, key_name="alice")
        # Also where another worker, or nobody's request, has put its end.
        await other.put(name, b"end", b"", status=status)
        for reader, there in (("alice", True), ("bob", False), ("", False), (None, True)):
            assert (await other.get(name, reader) is not None) == there
        for reader in ("bob", ""):
            assert not await other.delete(name, reader)
        assert await store.get(name, "alice") == StoredResponse(b"end", b"", status)
        assert await other.delete(name, "alice")
        assert await store.get(name) is None
    await put(store, "anybodys")
    assert await store.get("anybodys", "bob") is not None
    assert await store.delete("anybodys", "")


async def test_only_the_user_can_read_the_files(path: str) -> None:
    umask = os.umask(0)
    try:
        async with make_store(path) as store:
            await put(store, "resp_1")
            modes = {file.name: file.stat().st_mode & 0o777 for file in Path(path).parent.iterdir()}
    finally:
        os.umask(umask)
    names = ("responses.sqlite", "responses.sqlite-shm", "responses.sqlite-wal")
    assert modes == dict.fromkeys(names, 0o600)


async def test_a_temporary_file_is_removed_at_the_end_and_one_that_was_named_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with store_file(None, max_bytes=MIN_BYTES) as path:
        assert Path(path).is_relative_to(tmp_path)
        async with make_store(path) as store:
            await put(store, "resp_1")
    assert names_in(tmp_path) == []
    with store_file(str(tmp_path / "named"), max_bytes=MIN_BYTES) as path:
        assert path == str(tmp_path / "named")
    assert names_in(tmp_path) == ["named"]


async def test_a_name_means_nothing_to_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (":memory:", "file:x?mode=memory", "a'b%20"):
        async with make_store(name) as store, make_store(name, "b") as other:
            await put(store, "resp_1")
            assert await kept(other, "resp_1") == ["resp_1"]
            assert (tmp_path / name).is_file()


async def fill(path: Path) -> None:
    """Make a store with a hundred responses."""
    async with make_store(str(path)) as store:
        await put(store, *(f"{number}" for number in range(100)), size=3000)


def filled(path: Path) -> bytearray:
    """The bytes of a store with some responses in it."""
    asyncio.run(fill(path))
    return bytearray(path.read_bytes())


def not_a_database(path: Path) -> None:
    path.touch(0o600)
    path.write_text("this is a shopping list " * 1000)


def damaged(path: Path) -> None:
    data = filled(path)
    data[8192:20480] = os.urandom(12288)
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(filled(path)[:100_000])


def of_another_program(path: Path) -> None:
    path.touch(0o600)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")


def of_a_later_version(path: Path) -> None:
    filled(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 3")


def open_to_others(path: Path) -> None:
    path.touch()
    path.chmod(0o640)


def a_link(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (not_a_database, "file is not a database; move it away, and a new one is made"),
        (damaged, "move it away, and a new one is made"),
        (cut_off, "move it away, and a new one is made"),
        (of_another_program, "is a database of something else, or of another version of penstock"),
        (of_a_later_version, "is a database of something else, or of another version of penstock"),
        (open_to_others, "is open to others (mode bits 040); move it away, or chmod 600 it"),
        (a_link, "is no regular file; name another"),
        (Path.mkdir, "is no regular file; name another"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_start_with_a_line(
    path: str, prepare: Callable[[Path], None], said: str
) -> None:
    prepare(Path(path))
    with pytest.raises(StoreUnusable, match=re.escape(said)) as raised:
        store_file(path, max_bytes=MIN_BYTES).__enter__()
    assert str(raised.value).startswith(f"response store {path}: ")
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_not_there_ends_the_start_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "none" / "responses"
    with pytest.raises(StoreUnusable, match=f"^response store {path}: No such file or directory$"):
        store_file(str(path), max_bytes=MIN_BYTES).__enter__()


def test_a_file_that_cannot_be_written_ends_the_start_with_a_line(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(name: str, **options: Any) -> sqlite3.Connection:
        return sqlite3.Connection(f"file:{name}?mode=ro", uri=True, **options)

    monkeypatch.setattr("sqlite3.connect", read_only)
    with pytest.raises(StoreUnusable, match=r"attempt to write a readonly database; it has to be"):
        store_file(path, max_bytes=MIN_BYTES).__enter__()


def test_a_full_disk_ends_the_start_with_what_to_do(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str, **options: Any) -> sqlite3.Connection:
        connection = _opened(name, **options)
        connection.execute("PRAGMA max_page_count = 1")
        return connection

    _opened = sqlite3.connect
    monkeypatch.setattr("sqlite3.connect", full)
    with pytest.raises(StoreUnusable, match=r"database or disk is full; make room, and start"):
        store_file(path, max_bytes=MIN_BYTES).__enter__()


async def test_a_store_that_cannot_be_written_at_its_end_says_so_in_a_line(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(path)
    await store.open()

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "_change", full)
    await store.close()
    assert threads() == 0
    assert caplog.messages[-1] == f"response store {path}: database or disk is full"


def test_a_file_system_without_shared_memory_ends_the_start_with_a_line(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SQLite then keeps the journal it had, and says so where one asks.
    monkeypatch.setattr("sqlite3.connect", lambda name, **_: sqlite3.Connection(":memory:"))
    with pytest.raises(StoreUnusable, match=r"can keep no write-ahead log there; it has to be"):
        store_file(path, max_bytes=MIN_BYTES).__enter__()


async def test_no_thread_is_left_of_a_store_that_was_closed_or_never_opened(
    path: str, tmp_path: Path
) -> None:
    stores = [make_store(path), make_store(str(tmp_path))]
    await stores[0].open()
    assert threads() == 1
    await stores[0].close()
    assert threads() == 0
    with pytest.raises(StoreUnusable, match="is no regular file"):
        await stores[1].open()
    assert threads() == 0


def threads() -> int:
    return sum(thread.name.startswith("response store") for thread in threading.enumerate())
