"""The keys that requests show, what each opens, and what happens when the file of keys changes."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import inspect
import logging
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.router_doubles import FakeFleet, MemoryRouter, memory_router, model_files
from tokenizers import Tokenizer

from penstock_common import key_file_format
from penstock_router.admission import api_keys as keys_module
from penstock_router.admission import rate_limits
from penstock_router.admission.api_keys import Keys
from penstock_router.config import RouterConfig
from penstock_router.server.caller import WRONG_KEY
from penstock_router.server.parts import ROUTER

ALICE, BOB, ROOT, OLD = (f"psk-{name}-0123456789abcdef" for name in ("alice", "bob", "root", "old"))


def entry(name: str, key: str, **fields: object) -> str:
    lines = [f"[[keys]]\nname = '{name}'\nhash = '{key_file_format.hash_of(_digest(key))}'\n"]
    return "".join([*lines, *(f"{field} = {value}\n" for field, value in fields.items())])


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def _digest(key: str) -> bytes:
    return key_file_format.digest_of(key.encode())


FILE = (
    entry("alice", ALICE)
    + entry("bob", BOB, max_concurrent_requests=2)
    + entry("root", ROOT, scopes="['admin']")
    + entry("old", OLD, expires="2020-01-01")
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def served(byte_level: Tokenizer) -> FakeFleet:
    return FakeFleet(model_files(byte_level))


class StoppedClock:
    """A clock that stands still: nothing comes back into a bucket while a test looks."""

    def monotonic(self) -> float:
        return 1000.0


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> StoppedClock:
    clock = StoppedClock()
    monkeypatch.setattr(rate_limits, "time", clock)
    return clock


def _keys(file: Path | None, **settings: Any) -> Keys:
    path = None if file is None else str(file)
    return Keys(RouterConfig("a:1", api_keys_file=path, **settings))


def _name(keys: Keys, shown: str) -> str | None:
    key = keys.find(shown.encode())
    return None if key is None else key.name


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ---- Which key it is ---------------------------------------------------------------------------


def test_a_key_is_known_by_its_name_and_what_is_none_is_nobody(file: Path) -> None:
    keys = _keys(file)
    assert [_name(keys, key) for key in (ALICE, BOB, ROOT)] == ["alice", "bob", "root"]
    for wrong in (
        "",
        "x",
        ALICE[:-1],
        ALICE + " ",
        key_file_format.hash_of(_digest(ALICE)),
        "alice",
    ):
        assert _name(keys, wrong) is None


def test_scopes_and_limits_are_the_files(file: Path) -> None:
    keys = _keys(file)
    found = [keys.find(key.encode()) for key in (ALICE, BOB, ROOT)]
    assert [key is not None and key.is_admin for key in found] == [False, False, True]
    assert found[1] is not None
    assert found[1].max_concurrent_requests == 2


def test_a_key_of_the_command_line_is_one_beside_the_file(file: Path) -> None:
    keys = _keys(file, api_key="sesame", admin_key="operator")
    assert [_name(keys, key) for key in ("sesame", "operator", ALICE)] == [
        *("--api-key", "--admin-key"),
        "alice",
    ]
    both = _keys(None, api_key="same", admin_key="same").find(b"same")
    assert both is not None
    assert both.is_admin


def test_a_key_is_none_from_the_moment_it_expires(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    moment = time.gmtime(now + 100)
    file.write_text(entry("alice", ALICE, expires=time.strftime("%Y-%m-%dT%H:%M:%SZ", moment)))
    keys = _keys(file)
    assert _name(keys, ALICE) == "alice"
    monkeypatch.setattr("penstock_router.admission.api_keys.time.time", lambda: now + 101)
    assert _name(keys, ALICE) is None


def test_of_several_workers_each_has_its_part_of_a_keys_limits(file: Path) -> None:
    file.write_text(entry("alice", ALICE, max_concurrent_requests=5, requests_per_minute=7))
    parts = []
    for worker in range(3):
        key = _keys(file, workers=3, worker=worker).find(ALICE.encode())
        assert key is not None
        assert key.rates.requests is not None
        parts.append((key.max_concurrent_requests, key.rates.requests.per_minute))
    assert parts == [(2, 3), (2, 2), (1, 2)]


def test_a_limit_that_workers_cannot_share_out_is_refused(file: Path) -> None:
    with pytest.raises(
        key_file_format.KeyFileError, match="key bob: max_concurrent_requests: 2 is below"
    ):
        key_file_format.read(str(file), workers=3)


def test_digests_are_looked_up_and_compared_in_constant_time_whether_or_not_one_is_found(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def noted(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    keys = _keys(file)
    monkeypatch.setattr("penstock_router.admission.api_keys.hmac.compare_digest", noted)
    for shown in (ALICE, "wrong", OLD):
        keys.find(shown.encode())
    assert [other for _, other in compared] == [_digest(key) for key in (ALICE, "wrong", OLD)]
    assert all(len(one) == len(other) == 32 for one, other in compared)
    # Nothing else in there looks at what was shown.
    source = inspect.getsource(Keys.find)
    assert source.count("shown") == 2
    assert "==" not in source


def test_a_key_wrong_in_its_first_byte_takes_as_long_as_one_wrong_in_its_last(file: Path) -> None:
    keys = _keys(file)
    wrong = ["x" + ALICE[1:], ALICE[:-1] + "x", "y" * len(ALICE)]
    times: list[list[int]] = [[] for _ in wrong]
    for _ in range(2000):
        for column, key in zip(times, wrong, strict=True):
            shown = key.encode()
            begin_ns = time.perf_counter_ns()
            keys.find(shown)
            column.append(time.perf_counter_ns() - begin_ns)
    medians = [statistics.median(column) for column in times]
    assert max(medians) < 1.5 * min(medians)


def test_no_key_and_no_hash_shows_where_keys_are_printed(file: Path) -> None:
    config = RouterConfig(
        "a:1", api_key="sesame1", admin_key="sesame2", shard_api_key="sesame3", resume_key="sesame4"
    )
    found = _keys(file, api_key="sesame").find(b"sesame")
    shown = f"{config!r} {found!r} {_keys(file).find(ALICE.encode())!r}"
    assert "sesame" not in shown
    assert repr(_digest(ALICE)) not in shown


# ---- The file changes --------------------------------------------------------------------------


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Keys], Awaitable[asyncio.Task[None]]]:
    """Has keys followed at a test's pace."""
    monkeypatch.setattr(keys_module, "_POLL_S", 0.01)

    async def begin(keys: Keys) -> asyncio.Task[None]:
        return asyncio.create_task(keys.follow())

    return begin


async def test_a_key_that_is_added_or_taken_out_counts_from_the_next_request(
    file: Path, follow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = _keys(file)
    task = await follow(keys)
    key_file_format.replace(str(file), entry("carol", "psk-carol") + entry("bob", BOB))
    await _until(lambda: _name(keys, "psk-carol") == "carol")
    assert [_name(keys, key) for key in (ALICE, BOB)] == [None, "bob"]
    assert [record.message for record in caplog.records] == [
        f"--api-keys-file {file}: read again, keys: 2"
    ]
    task.cancel()


async def test_a_link_that_is_swapped_as_kubernetes_does_is_noticed(
    tmp_path: Path, follow: Any
) -> None:
    for version, name in enumerate(("one", "two")):
        folder = tmp_path / f"..version{version}"
        folder.mkdir()
        (folder / "keys.toml").write_text(entry(name, ALICE))
    (tmp_path / "..data").symlink_to("..version0")
    (tmp_path / "keys.toml").symlink_to("..data/keys.toml")
    keys = _keys(tmp_path / "keys.toml")
    assert _name(keys, ALICE) == "one"
    task = await follow(keys)
    (tmp_path / "..new").symlink_to("..version1")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    await _until(lambda: _name(keys, ALICE) == "two")
    task.cancel()


async def test_a_broken_file_changes_nothing_and_is_one_line(
    file: Path, follow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keys = _keys(file)
    task = await follow(keys)
    key_file_format.replace(str(file), FILE + "[[keys]]\nname = 'broken'\nhash = 'psk-oops'\n")
    await _until(lambda: bool(caplog.records))
    os.unlink(file)
    await _until(lambda: len(caplog.records) == 2)
    await asyncio.sleep(0.1)
    first, second = (record.getMessage() for record in caplog.records)
    assert "key broken: hash: must be sha256:" in first
    assert "the keys stay as they were" in first
    assert "psk-oops" not in first
    assert "No such file" in second
    assert _name(keys, ALICE) == "alice"
    key_file_format.replace(str(file), entry("alice2", ALICE))
    await _until(lambda: _name(keys, ALICE) == "alice2")
    task.cancel()


async def test_what_a_key_has_used_up_stays_used_up_when_the_file_changes(
    file: Path, follow: Any
) -> None:
    _write(file, entry("alice", ALICE, requests_per_minute=600))
    keys = _keys(file)
    key = keys.find(ALICE.encode())
    assert key is not None
    assert key.rates.requests is not None
    key.rates.requests.take(500, time.monotonic())
    task = await follow(keys)
    key_file_format.replace(str(file), entry("alice", ALICE, requests_per_minute=60000))
    await _until(lambda: key.rates.requests is not None and key.rates.requests.per_minute == 60000)
    again = keys.find(ALICE.encode())
    assert again is not None
    assert again.rates is key.rates
    assert key.rates.requests.level(time.monotonic()) < 60000
    task.cancel()


async def test_each_look_at_a_file_that_cannot_be_used_is_counted(file: Path, follow: Any) -> None:
    refusals: list[None] = []
    config = RouterConfig("a:1", api_keys_file=str(file))
    keys = Keys(config, on_refusal=lambda: refusals.append(None))
    task = await follow(keys)
    await asyncio.sleep(0.05)
    assert refusals == []
    # Also while it is not touched again: what was taken out of it holds all the time.
    key_file_format.replace(str(file), "[[keys]")
    await _until(lambda: len(refusals) > 3)
    os.unlink(file)
    count = len(refusals)
    await _until(lambda: len(refusals) > count + 3)
    key_file_format.replace(str(file), entry("alice2", ALICE))
    await _until(lambda: _name(keys, ALICE) == "alice2")
    count = len(refusals)
    await asyncio.sleep(0.05)
    assert len(refusals) == count
    task.cancel()


def test_two_keys_of_one_name_both_hold_until_they_expire_and_share_its_rates(file: Path) -> None:
    file.write_text(
        entry("alice", OLD, requests_per_minute=60, expires="2020-01-01")
        + entry("alice", ALICE, requests_per_minute=60, expires="2999-01-01")
        + entry("alice", BOB, requests_per_minute=60)
    )
    keys = _keys(file)
    assert [_name(keys, key) for key in (OLD, ALICE, BOB)] == [None, "alice", "alice"]
    first, second = keys.find(ALICE.encode()), keys.find(BOB.encode())
    assert first is not None
    assert second is not None
    assert first.rates is second.rates


def test_a_worker_that_starts_while_the_file_is_broken_lets_nobody_in(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("[[keys]")
    keys = _keys(file)
    assert _name(keys, ALICE) is None
    assert keys.are_asked_for
    assert "not TOML" in caplog.text


# ---- What a key opens --------------------------------------------------------------------------


def _all_keys(file: Path) -> dict[str, Any]:
    return {"api_keys_file": str(file)}


CHAT = b'{"model": "fake-model", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}'
ROUTES = [
    ("GET", "/v1/models", b""),
    ("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 1}'),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/generate", b'{"inputs": "x"}'),
    ("POST", "/tokenize", b'{"prompt": "x"}'),
]


async def _asked(router: MemoryRouter, headers: dict[str, str]) -> list[tuple[int, bytes]]:
    given = {"Content-Type": "application/json", "X-Request-Id": "one", **headers}
    answers = [await router.request(method, path, body, given) for method, path, body in ROUTES]
    return [(answer.status, answer.body) for answer in answers]


async def test_a_wrong_missing_expired_or_revoked_key_is_one_and_the_same_401_in_each_apis_form(
    file: Path, served: FakeFleet
) -> None:
    async with memory_router(served, **_all_keys(file)) as router:
        missing = await _asked(router, {})
        assert [status for status, _ in missing] == [401] * len(ROUTES)
        for body, form in zip((body for _, body in missing), FORMS, strict=True):
            assert form(WRONG_KEY) in body
        for shown in ("psk-wrong", OLD, "psk-revoked", "", ALICE[:-1]):
            assert await _asked(router, _bearer(shown)) == missing
            assert await _asked(router, {"x-api-key": shown}) == missing
        answer = await router.get("/v1/models")
        assert answer.headers["www-authenticate"] == "Bearer"


def _openai(message: str) -> bytes:
    return b'{"error":{"message":"%b","type":"AuthenticationError"' % message.encode()


FORMS: list[Callable[[str], bytes]] = [
    _openai,
    _openai,
    lambda message: b'"type":"authentication_error","message":"%b"' % message.encode(),
    lambda message: b'{"error":"%b","error_type"' % message.encode(),
    _openai,
]


async def test_a_users_key_and_an_admins_open_the_api(file: Path, served: FakeFleet) -> None:
    async with memory_router(served, **_all_keys(file)) as router:
        for key in (ALICE, ROOT):
            for headers in (_bearer(key), {"x-api-key": key}):
                assert {status for status, _ in await _asked(router, headers)} == {200}


@pytest.mark.parametrize("path", ["/admin/shards", "/console/feed"])
async def test_what_is_the_operators_wants_an_admins_key(
    file: Path, served: FakeFleet, path: str
) -> None:
    async with memory_router(served, **_all_keys(file)) as router:
        for key in ("psk-wrong", OLD, ""):
            answer = await router.get(path, **_bearer(key))
            assert (answer.status, answer.error["message"]) == (401, WRONG_KEY)
        answer = await router.get(path, **_bearer(ALICE))
        assert answer.status == 403
        assert "scope admin" in answer.error["message"]
        connection = router.connect()
        connection.send("GET", path, b"", _bearer(ROOT))
        status, _ = await connection.read_head()
        assert status == 200
        connection.close()


async def test_a_file_without_a_key_lets_nobody_in(file: Path, served: FakeFleet) -> None:
    _write(file, "")
    async with memory_router(served, **_all_keys(file)) as router:
        assert {status for status, _ in await _asked(router, {})} == {401}
        assert (await router.get("/admin/shards")).status == 401
        assert (await router.get("/health")).status == 200


async def test_the_records_say_whose_request_it_was(file: Path, served: FakeFleet) -> None:
    async with memory_router(served, **_all_keys(file)) as router:
        names: list[str] = []
        router.app[ROUTER].records.on_end.append(lambda record: names.append(record.key_name))
        await router.post("/v1/completions", {"prompt": "x"}, **_bearer(ALICE))
        await router.post("/v1/completions", {"prompt": "x"}, **_bearer("psk-wrong"))
        assert names == ["alice", ""]


async def test_an_audit_log_is_told_whose_request_it_was(file: Path, served: FakeFleet) -> None:
    async with memory_router(served, **_all_keys(file)) as router:
        session = {"X-Penstock-Session": "talk"}
        await router.post("/v1/completions", {"prompt": "x"}, **_bearer(ALICE), **session)
        await router.post("/v1/responses", {"input": "x"}, **_bearer(BOB), **session)
    assert [request.key_name for request in served.requests] == ["alice", "bob"]
    # Sessions of two keys are two, whatever their names.
    assert [request.session for request in served.requests] == ["alice/talk", "bob/talk"]


async def test_a_stored_response_is_there_for_the_name_that_asked_and_for_admins_only(
    file: Path, served: FakeFleet
) -> None:
    async with memory_router(served, **_all_keys(file)) as router:
        body = {"input": "x", "max_output_tokens": 1}
        made = await router.post("/v1/responses", body, **_bearer(ALICE))
        path = f"/v1/responses/{made.json()['id']}"
        follow = {**body, "previous_response_id": made.json()["id"]}
        for method, of in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            unknown = await router.request(method, f"/v1/responses/resp_1{of}", b"", _bearer(BOB))
            answer = await router.request(method, path + of, b"", _bearer(BOB))
            assert (unknown.status, answer.status) == (404, 404)
        assert (await router.post("/v1/responses", follow, **_bearer(BOB))).status == 400
        assert (await router.request("DELETE", path, b"", _bearer(BOB))).status == 404
        for key in (ALICE, ROOT):
            assert (await router.get(path, **_bearer(key))).status == 200
            assert (await router.post("/v1/responses", follow, **_bearer(key))).status == 200
        # Another key of the same name, as after it was lost.
        router.app[ROUTER].keys._replace(key_file_format.parse(entry("alice", "psk-new")))
        assert (await router.request("DELETE", path, b"", _bearer("psk-new"))).status == 200


async def test_nobody_cancels_what_is_made_in_the_background_for_another_key(
    file: Path, served: FakeFleet
) -> None:
    served.script = lambda request: [5] * 100_000
    async with memory_router(served, **_all_keys(file)) as router:
        body = {"input": "x", "background": True, "max_output_tokens": 300}
        served.step_s = 0.01
        made = await router.post("/v1/responses", body, **_bearer(ALICE))
        path = f"/v1/responses/{made.json()['id']}"
        assert (await router.post(f"{path}/cancel", {}, **_bearer(BOB))).status == 404
        assert (await router.request("DELETE", path, b"", _bearer(BOB))).status == 404
        assert (await router.get(path, **_bearer(ALICE))).json()["status"] == "in_progress"
        answer = await router.post(f"{path}/cancel", {}, **_bearer(ALICE))
        assert (answer.status, answer.json()["status"]) == (200, "cancelled")


# ---- Its limits --------------------------------------------------------------------------------


async def test_a_keys_own_bound_holds_among_many_at_once_and_others_are_not_held_up(
    file: Path, served: FakeFleet
) -> None:
    served.step_s = 0.002
    settings = {**_all_keys(file), "max_concurrent_requests_per_key": 5}
    async with memory_router(served, **settings) as router:
        most: dict[str, int] = {}
        admission = router.app[ROUTER].admission
        real = admission._change

        def noted(account: Any, **changes: int) -> None:
            real(account, **changes)
            most[account.key] = max(most.get(account.key, 0), account.in_flight)

        admission._change = noted  # type: ignore[method-assign]
        body = {"prompt": "x", "max_tokens": 5}
        asked = [
            router.post("/v1/completions", body, **_bearer(key))
            for key in [BOB] * 20 + [ALICE] * 20 + [ROOT] * 20
        ]
        answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} == {200}
        assert most == {"bob": 2, "alice": 5, "root": 5}


async def test_a_request_that_asks_for_more_than_its_key_may_have_is_told_so(
    file: Path, served: FakeFleet
) -> None:
    async with memory_router(served, **_all_keys(file)) as router:
        body = {"prompt": "x", "n": 3, "max_tokens": 1}
        answer = await router.post("/v1/completions", body, **_bearer(BOB))
        assert answer.status == 400
        assert "2 of this key at most (max_concurrent_requests)" in answer.error["message"]
        assert (await router.post("/v1/completions", body, **_bearer(ALICE))).status == 200


async def test_requests_over_a_keys_rate_are_429_in_each_apis_form_and_say_when_to_come_back(
    file: Path, served: FakeFleet, stopped: StoppedClock
) -> None:
    _write(file, entry("alice", ALICE, requests_per_minute=2) + entry("bob", BOB))
    async with memory_router(served, **_all_keys(file)) as router:
        body = {"prompt": "x", "max_tokens": 1}
        for left in ("1", "0"):
            answer = await router.post("/v1/completions", body, **_bearer(ALICE))
            assert answer.status == 200
            assert answer.headers["x-ratelimit-remaining-requests"] == left
        answer = await router.post("/v1/completions", body, **_bearer(ALICE))
        assert (answer.status, answer.error["type"]) == (429, "RateLimitError")
        assert answer.headers["retry-after"] == "30"
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        answer = await router.post("/v1/messages", CHAT, **_bearer(ALICE))
        assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
        answer = await router.post("/generate", {"inputs": "x"}, **_bearer(ALICE))
        assert (answer.status, answer.json()["error_type"]) == (429, "overloaded")
        answer = await router.post("/v1/completions", body, **_bearer(BOB))
        assert answer.status == 200
        assert not any(name.startswith("x-ratelimit") for name in answer.headers)
        metrics = (await router.get("/metrics")).body
        assert b'penstock_router_refused_total{reason="key_requests_per_minute"} 3.0' in metrics


async def test_requests_that_are_wrong_count_too(
    file: Path, served: FakeFleet, stopped: StoppedClock
) -> None:
    _write(file, entry("alice", ALICE, requests_per_minute=3))
    async with memory_router(served, **_all_keys(file)) as router:
        bodies = (b"[", b'{"prompt": "x", "n": -1}', b'{"prompt": "x"}', b"[")
        answers = [await router.post("/v1/completions", each, **_bearer(ALICE)) for each in bodies]
        assert [answer.status for answer in answers] == [400, 400, 200, 429]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_charged_for_prompts_and_for_what_came_out(
    file: Path, served: FakeFleet, stopped: StoppedClock, stream: bool
) -> None:
    _write(file, entry("alice", ALICE, tokens_per_minute=1000))
    async with memory_router(served, **_all_keys(file)) as router:
        key = router.app[ROUTER].keys.find(ALICE.encode())
        assert key is not None
        assert key.rates.tokens is not None
        body = {"prompt": [5] * 100, "max_tokens": 30, "n": 2, "stream": stream}
        answer = await router.post("/v1/completions", body, **_bearer(ALICE))
        assert answer.status == 200
        # While it ran all that it might put out was spoken for.
        assert answer.headers["x-ratelimit-remaining-tokens"] == "840"
        await asyncio.sleep(0)
        assert key.rates.tokens.level(stopped.monotonic()) == 840


async def test_tokens_that_a_stop_string_or_a_gone_client_saved_are_given_back(
    file: Path, served: FakeFleet, stopped: StoppedClock
) -> None:
    _write(file, entry("alice", ALICE, tokens_per_minute=1000))
    # The second token will not come.
    served.step_s = 0.3
    async with memory_router(served, **_all_keys(file)) as router:
        key = router.app[ROUTER].keys.find(ALICE.encode())
        assert key is not None
        assert key.rates.tokens is not None
        connection = router.connect()
        body = b'{"prompt": [5, 5, 5], "max_tokens": 100, "stream": true}'
        connection.send("POST", "/v1/completions", body, {"x-api-key": ALICE})
        await connection.read_head()
        connection.close()
        await _until(lambda: router.app[ROUTER].admission.in_flight == 0)
        # The prompt's three, and what came out before it was gone.
        assert 990 < key.rates.tokens.level(stopped.monotonic()) <= 997


async def test_tokens_that_are_made_again_for_a_resumed_stream_count_again(
    file: Path, served: FakeFleet, stopped: StoppedClock
) -> None:
    _write(file, entry("alice", ALICE, tokens_per_minute=100_000))
    settings = {"resume_key": "k", "resume_grace_s": 0.01}
    body = b'{"prompt": [5, 5, 5], "max_tokens": 400, "stream": true, "seed": 1}'
    headers = {**_bearer(ALICE), "x-penstock-resumable": "1"}
    async with memory_router(served, **_all_keys(file), **settings) as router:
        answer = await router.post("/v1/completions", body, **headers)
        ids = [line[4:] for line in answer.body.decode().split("\n") if line.startswith("id: ")]
        await _until(lambda: not router.app[ROUTER].live_streams._streams)
        key = router.app[ROUTER].keys.find(ALICE.encode())
        assert key is not None
        assert key.rates.tokens is not None
        before = key.rates.tokens.level(stopped.monotonic())
        assert before == 100_000 - 403
        # The client has all but the last token, again and again.
        for times in (1, 2):
            again = await router.post(
                "/v1/completions", body, **headers, **{"Last-Event-ID": ids[-2]}
            )
            assert again.status == 200
            await _until(lambda: not router.app[ROUTER].live_streams._streams)
            assert key.rates.tokens.level(stopped.monotonic()) == before - times * 403


async def test_a_stream_is_resumed_by_the_key_that_began_it_and_unknown_to_every_other(
    file: Path, served: FakeFleet
) -> None:
    _write(file, entry("alice", ALICE) + entry("bob", BOB) + entry("root", ROOT, scopes=["admin"]))
    settings = {"resume_key": "k", "resume_grace_s": 60, **_all_keys(file)}
    body = {"prompt": [5, 5, 5], "max_tokens": 40, "stream": True, "seed": 1}
    resumable = {"x-penstock-resumable": "1"}
    async with memory_router(served, **settings) as first, memory_router(served, **settings) as two:
        answer = await first.post("/v1/completions", body, **_bearer(ALICE), **resumable)
        ids = [line[4:] for line in answer.body.decode().split("\n") if line.startswith("id: ")]
        begun = len(served.requests)
        for router in (first, two):
            refusals = set()
            for last_id, key in ((ids[3], BOB), (ids[3], ROOT), ("A", BOB)):
                given = {**_bearer(key), **resumable, "Last-Event-ID": last_id}
                answer = await router.post("/v1/completions", body, **given)
                refusals.add((answer.status, answer.error["message"]))
            (refusal,) = refusals
            assert refusal[0] == 400
            assert len(served.requests) == begun
            given = {**_bearer(ALICE), **resumable, "Last-Event-ID": ids[3]}
            answer = await router.post("/v1/completions", body, **given)
            assert answer.status == 200
            assert answer.body.decode().count("id: ") == len(ids) - 4
            begun = len(served.requests)


async def test_a_shard_is_chosen_by_operators_and_by_nobody_else(
    file: Path, served: FakeFleet
) -> None:
    _write(file, entry("alice", ALICE) + entry("root", ROOT, scopes=["admin"]))
    body = {"prompt": [5], "max_tokens": 1}
    async with memory_router(served, **_all_keys(file)) as router:
        said = set()
        for address in ("fake:1", "fake:9", "nowhere"):
            given = {**_bearer(ALICE), "x-penstock-shard": address}
            answer = await router.post("/v1/completions", body, **given)
            said.add((answer.status, answer.error["message"]))
        text = "x-penstock-shard is for keys of the scope admin; this one is a user's"
        assert said == {(403, text)}
        given = {**_bearer(ROOT), "x-penstock-shard": "fake:1"}
        assert (await router.post("/v1/completions", body, **given)).status == 200
    async with memory_router(served) as router:
        answer = await router.post("/v1/completions", body, **{"x-penstock-shard": "fake:1"})
        assert (answer.status, answer.error["message"].split(";")[0]) == (
            403,
            "x-penstock-shard is closed",
        )


async def test_tokens_that_were_made_for_a_client_who_never_read_them_count(
    file: Path, served: FakeFleet, stopped: StoppedClock
) -> None:
    _write(file, entry("alice", ALICE, tokens_per_minute=100_000))
    async with memory_router(served, **_all_keys(file)) as router:
        key = router.app[ROUTER].keys.find(ALICE.encode())
        assert key is not None
        assert key.rates.tokens is not None
        connection = router.connect()
        body = b'{"prompt": [5, 5, 5], "max_tokens": 400, "stream": true}'
        connection.send("POST", "/v1/completions", body, {"x-api-key": ALICE})
        await connection.read_head()
        connection.stop_reading()
        await _until(lambda: not served.running)
        connection.close()
        await _until(lambda: router.app[ROUTER].admission.in_flight == 0)
        assert key.rates.tokens.level(stopped.monotonic()) == 100_000 - 403


async def test_tokens_over_a_keys_rate_are_429_before_a_shard_hears_of_it(
    file: Path, served: FakeFleet, stopped: StoppedClock
) -> None:
    _write(file, entry("alice", ALICE, tokens_per_minute=200))
    async with memory_router(served, **_all_keys(file)) as router:
        body = {"prompt": [5] * 190, "max_tokens": 10}
        assert (await router.post("/v1/completions", body, **_bearer(ALICE))).status == 200
        asked = len(served.requests)
        answer = await router.post("/v1/completions", body, **_bearer(ALICE))
        assert (answer.status, answer.headers["x-ratelimit-limit-tokens"]) == (429, "200")
        assert answer.headers["retry-after"] == "60"
        assert len(served.requests) == asked
        body = {"input": [[5] * 190]}
        answer = await router.post("/v1/embeddings", body, **_bearer(ALICE))
        assert answer.status == 429


async def test_changed_limits_hold_from_the_next_request_on(
    file: Path, served: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "_POLL_S", 0.01)
    async with memory_router(served, **_all_keys(file)) as router:
        keys = router.app[ROUTER].keys

        def bound() -> int | None:
            key = keys.find(BOB.encode())
            return None if key is None else key.max_concurrent_requests

        body = {"prompt": "x", "n": 3, "max_tokens": 1}
        assert (await router.post("/v1/completions", body, **_bearer(BOB))).status == 400
        key_file_format.replace(str(file), entry("bob", BOB, max_concurrent_requests=3))
        await _until(lambda: bound() == 3)
        assert (await router.post("/v1/completions", body, **_bearer(BOB))).status == 200
        answer = await router.post("/v1/completions", body, **_bearer(ALICE))
        assert answer.status == 401


def test_the_configuration_is_told_what_every_worker_needs() -> None:
    config = RouterConfig("a:1", workers=3)
    parts = [dataclasses.replace(config, worker=index).part_of(7) for index in range(3)]
    assert parts == [3, 2, 2]
