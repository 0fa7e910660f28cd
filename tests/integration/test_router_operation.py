"""Routers as operators run them: changes to the fleet, SIGTERM, and the audit log of it all."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.budget import budget, in_soak, seeded
from support.processes import Router, Shard, is_alive, running, wait_until
from support.resumable_answers import LASTING, Answer, begun, read, read_on

KEY = {"Authorization": "Bearer operator"}
_LISTENS = "listening on"
_GENERATED = "penstock_router_generation_seconds_count"
RESUMABLE = {"x-penstock-resumable": "1"}
LONG = {"prompt": "On and on", "max_tokens": 1500, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Shard]]:
    logs = tmp_path_factory.mktemp("shards")
    shards = [Shard(logs / f"shard{index}", "--step-ms", "5") for index in range(3)]
    with running(*shards):
        yield shards


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    # A connection for each request, so that all workers get some.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as opened:
        yield opened


def _file_of(path: Path, shards: list[Shard]) -> None:
    new = path.with_suffix(".new")
    new.write_text("".join(f"{shard.address}\n" for shard in shards))
    new.rename(path)


def _workers(router: Router) -> list[Any]:
    return [child for child in router.children if "spawn_main" in " ".join(child.cmdline())]


async def _replaced(router: Router) -> None:
    """A worker is killed, and another listens in its place."""
    count, worker = router.log.count(_LISTENS), _workers(router)[0]
    worker.kill()
    await asyncio.to_thread(worker.wait)
    await _until_listening(router, count + 1)


async def _until_listening(router: Router, count: int) -> None:
    """Wait until `count` workers have listened. Each worker logs one line once it can serve."""
    await asyncio.to_thread(
        wait_until,
        lambda: router.log.count(_LISTENS) >= count,
        timeout_s=60,
        what=f"{count} workers that listen",
    )


# ---- What is changed while it runs -------------------------------------------------------------


@dataclass(frozen=True)
class Managed:
    """A router with two workers, and the file of its shards."""

    router: Router
    file: Path


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory, shards: list[Shard]) -> Iterator[Managed]:
    folder = tmp_path_factory.mktemp("managed")
    _file_of(folder / "shards", shards)
    flags = ("--workers", "2", "--admin-key", "operator")
    router = Router(folder / "router", [f"file://{folder}/shards"], *flags)
    with running(router):
        yield Managed(router, folder / "shards")


class Operator:
    """Talks to /admin of a router with several workers."""

    def __init__(self, session: aiohttp.ClientSession, router: Router) -> None:
        self._session = session
        self._url = router.url + "/admin/shards"

    async def ask(self, method: str, path: str = "", **more: Any) -> tuple[int, Any]:
        async with self._session.request(method, self._url + path, headers=KEY, **more) as response:
            return response.status, await response.json()

    async def addresses(self) -> set[str]:
        status, body = await self.ask("GET")
        assert status == 200
        return {shard["address"] for shard in body["shards"]}

    async def wait_for(self, *shards: Shard) -> None:
        """Wait until 12 answers in a row list these shards and no others: any worker may answer."""
        wanted, in_a_row = {shard.address for shard in shards}, 0
        async with asyncio.timeout(20):
            while in_a_row < 12:
                in_a_row = in_a_row + 1 if await self.addresses() == wanted else 0
                await asyncio.sleep(0.02)


async def _whole(
    session: aiohttp.ClientSession, router: Router, body: dict[str, Any], **headers: str
) -> Any:
    async with session.post(router.url + "/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def test_several_workers_count_together_and_each_shard_once(
    managed: Managed, session: aiohttp.ClientSession
) -> None:
    router = managed.router
    await _until_listening(router, 2)
    for _ in range(12):
        await _whole(session, router, {"prompt": "Counted", "max_tokens": 3})
    async with asyncio.timeout(20):
        while _total(await _metrics(session, router), _GENERATED) != 12:
            await asyncio.sleep(0.1)
    text = await _metrics(session, router)
    assert _total(text, "penstock_router_output_tokens_total") == 36
    assert _total(text, "penstock_router_shards") == 3
    assert _total(text, "penstock_router_shard_state") == 3


def _total(metrics: str, name: str) -> float:
    """Over all labels."""
    found = (line for line in metrics.splitlines() if re.match(rf"{name}[ {{]", line))
    return sum(float(line.split()[-1]) for line in found)


async def test_a_file_of_shards_that_changes_under_load_is_an_error_to_nobody(
    managed: Managed, shards: list[Shard], session: aiohttp.ClientSession
) -> None:
    rng = seeded("a_file_of_shards_that_changes")
    router, file = managed.router, managed.file
    _file_of(file, shards)
    body = {"prompt": "Moved about", "max_tokens": 120, "seed": 3, "ignore_eos": True}
    answers: list[str] = []

    async def ask_again_and_again(until_s: float) -> None:
        while time.monotonic() < until_s:
            answers.append((await _whole(session, router, body))["choices"][0]["text"])

    until_s = time.monotonic() + budget(4, 120)
    clients = [asyncio.create_task(ask_again_and_again(until_s)) for _ in range(budget(4, 8))]
    others = shards[1:]
    while time.monotonic() < until_s:
        await asyncio.sleep(rng.uniform(0.2, 1.5))
        # One stays: while all others are new, none of them may be connected yet.
        sets: list[list[Shard]] = [[], shards[1:2], shards[2:], shards[1:]]
        others = rng.choice([some for some in sets if some != others])
        _file_of(file, [shards[0], *others])
    await asyncio.gather(*clients)
    assert "leaves the fleet" in router.log
    assert len(answers) > 10
    assert len(set(answers)) == 1


async def test_an_answer_outlives_the_worker_that_began_it(managed: Managed) -> None:
    router = managed.router
    body = {**LASTING, "prompt": "Workers"}
    whole, answers = Answer(), [Answer() for _ in range(4)]
    await read(router.url, "/v1/completions", body, whole)
    reads = [
        asyncio.create_task(read(router.url, "/v1/completions", body, answer)) for answer in answers
    ]
    await begun(answers)
    await _replaced(router)
    await asyncio.gather(*reads, return_exceptions=True)
    await read_on(router.url, body, [answer for answer in answers if not answer.done])
    assert all(answer.shown == whole.shown for answer in answers)


async def _ask_while_one_is_replaced(router: Router, session: aiohttp.ClientSession) -> set[int]:
    """The statuses of what is asked until some of the last went to the new one."""
    replaced = asyncio.create_task(_replaced(router))
    # Killed before anything is asked.
    await asyncio.sleep(0)
    body = {"prompt": "x", "max_tokens": 2}
    statuses, asked_after = set(), 0
    while asked_after < 20:
        asked_after += replaced.done()
        try:
            async with session.post(router.url + "/v1/completions", json=body) as answer:
                statuses.add(answer.status)
        except aiohttp.ClientConnectionError:
            # It was on its way to the one that died.
            statuses.add(0)
        await asyncio.sleep(0.02)
    await replaced
    return statuses


# After those of the file, which it overrides.
async def test_what_an_operator_changes_holds_for_all_workers_also_for_new_ones(
    managed: Managed, shards: list[Shard], session: aiohttp.ClientSession
) -> None:
    first, second, third = shards
    router = managed.router
    _file_of(managed.file, [first, second])
    operator = Operator(session, router)
    await operator.wait_for(first, second)
    status, _ = await operator.ask("POST", json={"address": third.address})
    assert status == 202
    await operator.wait_for(first, second, third)
    status, body = await operator.ask("DELETE", f"/{first.address}")
    assert (status, body["status"]) == (202, "leaving")
    await operator.wait_for(second, third)
    # The new one takes nothing before it can serve.
    assert await _ask_while_one_is_replaced(router, session) <= {0, 200}
    await operator.wait_for(second, third)
    for shard in (second, third):
        await operator.ask("DELETE", f"/{shard.address}")
    await operator.wait_for()
    assert router.status("/ready") == 503
    status, _ = await operator.ask("POST", json={"address": first.address})
    await operator.wait_for(first)
    # A new worker has to fetch the tokenizer first.
    router.wait_healthy()


async def test_what_happens_between_shards_is_counted_and_sigterm_waits_for_nobody_to_come_back(
    tmp_path: Path, shards: list[Shard], session: aiohttp.ClientSession
) -> None:
    two = shards[:2]
    addresses = [shard.address for shard in two]
    flags = ("--verify-share", "1", "--resume-grace-s", "60")
    router = Router(tmp_path / "router", addresses, *flags)
    body = {"prompt": "Counted", "max_tokens": 150, "seed": 3, "ignore_eos": True}
    with running(router):
        async with asyncio.timeout(20):
            while "penstock_router_shards_serving 2.0" not in await _metrics(session, router):
                await asyncio.sleep(0.05)
        whole = await _whole(session, router, body)
        answers = [asyncio.create_task(_whole(session, router, body)) for _ in range(4)]
        await asyncio.sleep(0.3)
        two[0].engine.kill()
        for answer in await asyncio.gather(*answers):
            assert answer["choices"] == whole["choices"]
        events = (("sent", "least_load"), ("continued", "engine_died"), ("verified", "equal"))
        async with asyncio.timeout(20):
            for event, reason in events:
                labels = f'{{event="{event}",reason="{reason}"}}'
                while f"penstock_router_fleet_events_total{labels}" not in await _metrics(
                    session, router
                ):
                    await asyncio.sleep(0.1)
        await _events(session, router, LONG, most=3)
        # A third of the time that a client may take to come back.
        assert await asyncio.to_thread(router.terminate, 20.0) == 0
    await asyncio.to_thread(two[0].wait_healthy)


async def _metrics(session: aiohttp.ClientSession, router: Router) -> str:
    async with session.get(router.url + "/metrics") as response:
        return await response.text()


# ---- SIGTERM -----------------------------------------------------------------------------------


async def _events(
    session: aiohttp.ClientSession, router: Router, body: dict[str, Any], most: int | None = None
) -> list[Any]:
    """Return the events of a resumable stream; with `most`, only the first ones."""
    found: list[Any] = []
    async with session.post(
        router.url + "/v1/completions", json=body, headers=RESUMABLE
    ) as response:
        assert response.status == 200
        async for raw in response.content:
            if raw.startswith(b"data: "):
                data = raw.decode().removeprefix("data: ").strip()
                found.append(data if data == "[DONE]" else json.loads(data))
                if len(found) == most:
                    break
    return found


@pytest.mark.parametrize("workers", [in_soak("1"), "2"])
async def test_sigterm_finishes_streams_that_are_read_and_cuts_those_that_take_too_long(
    tmp_path: Path, shards: list[Shard], session: aiohttp.ClientSession, workers: str
) -> None:
    flags = ("--workers", workers, "--shutdown-timeout-s", "1.5", "--resume-grace-s", "60")
    log = tmp_path / "audit"
    audit = ("--audit-log", str(log), "--audit-prompts")
    router = Router(tmp_path / "router", [shard.address for shard in shards], *flags, *audit)
    with running(router):
        await _until_listening(router, int(workers))
        short = {**LONG, "max_tokens": 60}
        stopped = {"prompt": "Stop", "max_tokens": 100, "stop": ["e"], "ignore_eos": True}
        await asyncio.gather(*(_whole(session, router, stopped) for _ in range(3)))
        reading = [asyncio.create_task(_events(session, router, short)) for _ in range(3)]
        reading += [asyncio.create_task(_events(session, router, LONG)) for _ in range(2)]
        for _ in range(2):
            await _events(session, router, LONG, most=3)
        children = router.children
        router.process.send_signal(signal.SIGTERM)
        ended = await asyncio.gather(*reading)
        assert await asyncio.to_thread(router.process.wait, 10) == 0
        # The one that minds shared memory sees last that nobody is left.
        wait_until(
            lambda: not any(map(is_alive, children)), timeout_s=5, what="children have ended"
        )
    for events in ended[:3]:
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    for events in ended[3:]:
        assert events[-2:] == [
            {
                "error": {
                    "message": "the router is shutting down",
                    "type": "ServiceUnavailableError",
                    "param": None,
                    "code": 503,
                }
            },
            "[DONE]",
        ]
    await asyncio.to_thread(_check_replay, tmp_path, shards, records=3 + 5 + 2)


def _check_replay(folder: Path, shards: list[Shard], *, records: int) -> None:
    """Assert that `replay` finds all records equal. A record that a stop string or the shutdown cut
    short is compared up to its end.
    """
    command = [sys.executable, "-m", "penstock_cli.main", "replay"]
    command += sorted(str(log) for log in folder.glob("audit*"))
    command += ["--shards", ",".join(shard.address for shard in shards)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.stdout.startswith(f"{records} records: {records} equal, 0 different, 0 failed")
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.soak
def test_several_workers_serve_all_that_comes_once_one_says_that_it_can(
    tmp_path: Path, shards: list[Shard]
) -> None:
    router = Router(tmp_path / "router", [shards[0].address], "--workers", "4")
    with running(router):
        # Each on a connection of its own, so that all workers get some.
        for _ in range(40):
            status, _ = router.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert status == 200


# The last one: it ends the shards.
async def test_a_shard_that_is_drained_hands_over_and_one_that_is_dead_or_hangs_is_said_to_be(
    managed: Managed, shards: list[Shard], session: aiohttp.ClientSession
) -> None:
    router, (busy, dead, hung) = managed.router, shards
    operator = Operator(session, router)
    for shard in shards:
        await operator.ask("POST", json={"address": shard.address})
    await operator.wait_for(*shards)
    body = {"prompt": "Drained", "max_tokens": 300, "ignore_eos": True, "seed": 1}
    answer = asyncio.create_task(
        _whole(session, router, body, **KEY, **{"x-penstock-shard": busy.address})
    )
    await asyncio.sleep(0.5)
    status, said = await operator.ask("POST", f"/{busy.address}/drain")
    assert (status, said["status"]) == (202, "draining")
    assert (await answer)["usage"]["completion_tokens"] == 300
    dead.process.kill()
    hung.process.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            answers = await asyncio.gather(
                *(operator.ask("POST", f"/{shard.address}/drain") for shard in (dead, hung))
            )
        for shard, (status, said) in zip((dead, hung), answers, strict=True):
            assert status == 503
            assert f"{shard.address} does not drain" in said["error"]["message"]
    finally:
        hung.process.send_signal(signal.SIGCONT)
