"""A store whose files are removed or replaced while it is open: what it says, and what is kept."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.router_doubles import FakeFleet, memory_router

from penstock_router.server.parts import ROUTER
from penstock_router.store.response_store import (
    MIN_BYTES,
    ResponseStore,
    StoredResponse,
    StoreUnavailable,
)

ENDINGS = ("", "-wal", "-shm")
HAS_COMMANDS = pytest.mark.skipif(sys.platform != "linux", reason="Linux lists open files")


@pytest.fixture
def path(tmp_path: Path) -> str:
    # A name that a shell would take apart.
    folder = tmp_path / "of a router"
    folder.mkdir()
    return str(folder / "responses.sqlite")


def make_store(path: str, failures: list[None], silent_s: float = 1000.0) -> ResponseStore:
    return ResponseStore(
        path,
        max_bytes=64 * MIN_BYTES,
        ttl_s=100.0,
        owner=os.urandom(8).hex(),
        silent_s=silent_s,
        on_failure=lambda: failures.append(None),
    )


async def put(store: ResponseStore, response_id: str) -> None:
    await store.put(response_id, b"answer", b"[]", status="completed")


async def advice_of(store: ResponseStore) -> str:
    with pytest.raises(StoreUnavailable) as raised:
        await store.beat()
    return raised.value.advice


def run(commands: str) -> None:
    subprocess.run(["sh", "-c", commands], check=True)


async def is_kept(path: str, response_id: str) -> bool:
    async with make_store(path, []) as store:
        return await store.get(response_id) == StoredResponse(b"answer", b"[]", "completed")


@pytest.mark.parametrize("ending", ENDINGS)
async def test_what_would_be_lost_is_refused_and_counted_and_what_is_open_is_read(
    path: str, ending: str
) -> None:
    failures: list[None] = []
    async with make_store(path, failures) as store:
        await put(store, "resp_1")
        os.unlink(path + ending)
        with pytest.raises(StoreUnavailable, match=re.escape(path + ending) + " was removed"):
            await put(store, "resp_2")
        with pytest.raises(StoreUnavailable, match="nothing is stored"):
            await store.delete("resp_1")
        assert len(failures) == 2
        assert await store.get("resp_1") is not None


async def test_a_file_in_the_place_of_the_open_one_is_noticed(path: str) -> None:
    async with make_store(path, []) as store:
        await put(store, "resp_1")
        shutil.copy(path, path + ".copy")
        os.replace(path + ".copy", path)
        with pytest.raises(StoreUnavailable, match="is another file now"):
            await put(store, "resp_2")


async def test_a_file_that_comes_back_is_used_again(path: str) -> None:
    async with make_store(path, []) as store:
        os.rename(path, path + ".away")
        with pytest.raises(StoreUnavailable):
            await put(store, "resp_1")
        os.rename(path + ".away", path)
        await put(store, "resp_1")
    assert await is_kept(path, "resp_1")


@HAS_COMMANDS
@pytest.mark.parametrize(
    "removed", [ENDINGS, ("",), ("-wal",), ("-wal", "-shm")], ids=lambda each: "and".join(each)
)
async def test_the_commands_that_it_tells_keep_all_that_was_stored(
    path: str, removed: tuple[str, ...]
) -> None:
    async with make_store(path, []) as store, make_store(path, []) as other:
        await put(store, "resp_1")
        await put(other, "resp_2")
        for ending in removed:
            os.unlink(path + ending)
        commands = (await advice_of(store)).partition("lost: ")[2]
        run(commands)
    # Both have closed by now, and neither may have touched what was put back.
    assert await is_kept(path, "resp_1")
    assert await is_kept(path, "resp_2")


@HAS_COMMANDS
async def test_of_another_file_it_says_that_a_restart_uses_it_and_how_to_go_back(path: str) -> None:
    async with make_store(path, []) as store:
        await put(store, "resp_1")
        for ending in ENDINGS:
            os.unlink(path + ending)
        async with make_store(path, []):
            advice = await advice_of(store)
        assert advice.startswith("a restart of the router uses what is there now")
        run(advice.partition("first by: ")[2])
    assert await is_kept(path, "resp_1")


async def test_it_is_noticed_without_a_request_and_told_once_and_so_is_its_end(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    failures: list[None] = []
    async with asyncio.timeout(20), make_store(path, failures, silent_s=0.1) as store:
        await put(store, "resp_1")
        os.rename(path, path + ".away")
        while len(failures) < 4:
            await asyncio.sleep(0.01)
        assert len([record for record in caplog.records if "was removed" in record.message]) == 1
        os.rename(path + ".away", path)
        while "works again" not in caplog.text:
            await asyncio.sleep(0.01)


async def test_an_answer_never_says_that_it_is_stored_where_it_would_be_lost(
    fleet: FakeFleet, path: str
) -> None:
    async with memory_router(fleet, response_store=path) as router:
        before = (await router.post("/v1/responses", {"input": "Hello"})).json()
        os.unlink(path)
        after = (await router.post("/v1/responses", {"input": "Hello"})).json()
        assert (before["store"], after["store"]) == (True, False)
        assert (await router.get(f"/v1/responses/{before['id']}")).status == 200
        assert (await router.get(f"/v1/responses/{after['id']}")).status == 404
        failures = router.app[ROUTER].metrics.store_failures
        assert failures._value.get() >= 1
