"""Usage of each key, by model: counted at once, shown to operators, and bounded."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.router_doubles import (
    INFO,
    Answer,
    CachingFleet,
    FakeFleet,
    MemoryRouter,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

from penstock_common import key_file_format
from penstock_router.admission import api_keys
from penstock_router.config import RouterConfig
from penstock_router.observe import key_usage
from penstock_router.observe.key_usage import OTHER_KEYS, KeyUsage
from penstock_router.observe.request_record import RequestRecord, Usage

KEYS = {name: f"psk-{name}-0123456789abcdef" for name in ("alice", "bob", "root")}


def write_keys(file: Path, *names: str) -> None:
    """A file of keys; root is the operator's."""
    entries = []
    for name in names:
        digest = key_file_format.hash_of(key_file_format.digest_of(KEYS[name].encode()))
        scopes = "\nscopes = ['admin']" if name == "root" else ""
        entries.append(f"[[keys]]\nname = '{name}'\nhash = '{digest}'{scopes}\n")
    file.write_text("\n".join(entries))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write_keys(path, *KEYS)
    return path


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def complete(router: MemoryRouter, key: str, prompt: str = "Hello", tokens: int = 3) -> Any:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    answer = await router.post("/v1/completions", body, **bearer(key))
    assert answer.status == 200
    return answer.json()["usage"]


def rows_of(answer: Answer) -> dict[str, dict[str, Any]]:
    """The rows by key, without key and model."""
    assert answer.status == 200
    rows = {row.pop("key"): row for row in answer.json()["usage"]}
    assert {row.pop("model") for row in rows.values()} <= {INFO.model}
    return rows


@pytest.fixture
def fleet(byte_level: Tokenizer) -> FakeFleet:
    return CachingFleet(model_files(byte_level))


async def test_tokens_and_requests_are_told_by_key_and_model(fleet: FakeFleet, file: Path) -> None:
    before = int(time.time())
    async with memory_router(fleet, api_keys_file=str(file)) as router:
        first = await complete(router, "alice", tokens=3)
        again = await complete(router, "alice", tokens=5)
        await complete(router, "bob", "Something else", tokens=7)
        prompt_tokens = first["prompt_tokens"]
        assert again["prompt_tokens_details"]["cached_tokens"] == prompt_tokens - 1
        answer = await router.get("/admin/usage", **bearer("root"))
        assert before <= answer.json()["since"] <= time.time()
        rows = rows_of(answer)
        assert rows["alice"] == {
            "requests": 2,
            "prompt_tokens": 2 * prompt_tokens,
            "cached_tokens": prompt_tokens - 1,
            "completion_tokens": 8,
        }
        assert (rows["bob"]["requests"], rows["bob"]["completion_tokens"]) == (1, 7)
        assert set(rows) == {"alice", "bob"}


async def test_the_page_of_metrics_shows_an_answer_as_it_is(fleet: FakeFleet) -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text("utf-8")
    example = json.loads(page[page.index('{"since"') :].partition("\n```")[0])
    async with memory_router(fleet, admin_key="operator") as router:
        await router.complete(max_tokens=1)
        answer = (await router.get("/admin/usage", Authorization="Bearer operator")).json()
    assert list(answer) == list(example)
    assert [list(row) for row in answer["usage"]] == [list(row) for row in example["usage"]]


async def test_a_request_that_is_refused_has_used_nothing(fleet: FakeFleet, file: Path) -> None:
    async with memory_router(fleet, api_keys_file=str(file)) as router:
        for body in ({"prompt": "x", "max_tokens": -7}, {"prompt": "x", "model": "unknown"}):
            assert (await router.post("/v1/completions", body, **bearer("bob"))).status >= 400
        assert rows_of(await router.get("/admin/usage", **bearer("root"))) == {}


async def test_usage_is_the_operators(fleet: FakeFleet, file: Path) -> None:
    async with memory_router(fleet, api_keys_file=str(file)) as router:
        assert (await router.get("/admin/usage", **bearer("alice"))).status == 403
        assert (await router.get("/admin/usage")).status == 401
    async with memory_router(fleet, api_key="clients") as router:
        answer = await router.get("/admin/usage", Authorization="Bearer clients")
        assert answer.status == 403


async def test_metrics_have_keys_only_where_that_is_asked_for(fleet: FakeFleet, file: Path) -> None:
    async with memory_router(fleet, api_keys_file=str(file)) as router:
        await complete(router, "alice")
        text = (await router.get("/metrics")).body.decode()
        assert "alice" not in text
        assert "penstock_router_key_" not in text
    settings = {"api_keys_file": str(file), "metrics_by_key": True}
    async with memory_router(CachingFleet(fleet.files), **settings) as router:
        usage = await complete(router, "alice", tokens=3)
        await complete(router, "alice", tokens=5)
        text = (await router.get("/metrics")).body.decode()
    labels = f'key="alice",kind="{{}}",model="{INFO.model}"'
    kinds = {"prompt": usage["prompt_tokens"] + 1, "cached_prompt": usage["prompt_tokens"] - 1}
    for kind, tokens in {**kinds, "completion": 8}.items():
        name = f"penstock_router_key_tokens_total{{{labels.format(kind)}}}"
        assert f"{name} {float(tokens)}" in text.splitlines()
    requests = f'penstock_router_key_requests_total{{key="alice",model="{INFO.model}"}} 2.0'
    assert requests in text.splitlines()


async def test_what_a_key_used_can_be_seen_after_it_was_revoked(
    fleet: FakeFleet, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "_POLL_S", 0.01)
    async with memory_router(fleet, api_keys_file=str(file)) as router:
        await complete(router, "bob")
        write_keys(file, "alice", "root")
        async with asyncio.timeout(10):
            while (await router.get("/v1/models", **bearer("bob"))).status != 401:
                await asyncio.sleep(0.01)
        rows = rows_of(await router.get("/admin/usage", **bearer("root")))
        assert rows["bob"]["requests"] == 1


# ---- bounds ------------------------------------------------------------------------------------


def end(usage: KeyUsage, key: str, model: str = "m", tokens: int = 1) -> None:
    """A request of this key ends."""
    record = RequestRecord(request_id="r", method="POST", route="/", arrived_s=0.0)
    record.key_name, record.model, record.usage = key, model, Usage(tokens, tokens)
    usage.on_request_end(record)


def requests_of(usage: KeyUsage) -> dict[str, int]:
    """Return the number of requests of each key, over all models."""
    found: dict[str, int] = {}
    for key, _, row in usage._total().all_rows():
        found[key] = found.get(key, 0) + row.requests
    return found


def one_worker() -> KeyUsage:
    return KeyUsage(RouterConfig("a:1"))


def test_of_keys_that_went_the_last_stay_and_the_others_are_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_usage, "MAX_REMOVED_KEYS", 2)
    usage = one_worker()
    for number in range(20):
        name = f"key-{number}"
        usage.keep_keys({"root", name})
        for model in ("m", "n"):
            end(usage, name, model)
            end(usage, "root", model)
    # Without a key, which none can be taken from.
    end(usage, "")
    expected = {"root": 40, "": 1, "key-19": 2, "key-18": 2, "key-17": 2, OTHER_KEYS: 34}
    assert requests_of(usage) == expected


def test_a_key_that_comes_back_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_usage, "MAX_REMOVED_KEYS", 1)
    usage = one_worker()
    end(usage, "back")
    usage.keep_keys({"new"})
    usage.keep_keys({"new", "back"})
    for number in range(5):
        end(usage, f"gone-{number}")
        usage.keep_keys({"new", "back"})
    end(usage, "back")
    assert requests_of(usage) == {"back": 2, "gone-4": 1, OTHER_KEYS: 4}


def test_more_keys_than_there_is_room_for_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_usage, "MAX_KEYS", 3)
    usage = one_worker()
    for number in range(9):
        end(usage, f"key-{number}")
        end(usage, "key-0")
    assert requests_of(usage) == {"key-0": 10, "key-1": 1, "key-2": 1, OTHER_KEYS: 6}


def test_a_request_takes_as_long_with_ten_thousand_keys_as_with_ten() -> None:
    def seconds(num_keys: int) -> float:
        usage = one_worker()
        for number in range(num_keys):
            end(usage, f"key-{number}")
        best_s = 1.0
        for _ in range(20):
            begin_s = time.perf_counter()
            for _ in range(200):
                end(usage, "key-7")
            best_s = min(best_s, time.perf_counter() - begin_s)
        return best_s

    assert seconds(10_000) < 5 * seconds(10)


# ---- several workers ---------------------------------------------------------------------------


def workers(folder: Path) -> list[KeyUsage]:
    config = RouterConfig("a:1", workers=2, changes_file=str(folder / "changes"))
    return [KeyUsage(replace(config, worker=index)) for index in range(2)]


async def written(*usages: KeyUsage) -> None:
    """Run each until its rows are in its file."""
    tasks = [asyncio.create_task(usage.write_regularly()) for usage in usages]
    async with asyncio.timeout(10):
        while not all(each._own_file and each._own_file.exists() for each in usages):
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_any_worker_answers_for_all_and_one_that_starts_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_usage, "WRITE_EVERY_S", 0.01)
    first, second = workers(tmp_path)
    for _ in range(3):
        end(first, "alice")
    end(second, "alice")
    end(second, "bob")
    await written(first, second)
    for usage in (first, second):
        assert requests_of(usage) == {"alice": 4, "bob": 1}
    since = first._table.since
    first, second = workers(tmp_path)
    end(first, "alice")
    assert first._own_file is not None
    first._own_file.unlink()
    await written(first)
    assert requests_of(second) == {"alice": 5, "bob": 1}
    assert first._table.since == since
