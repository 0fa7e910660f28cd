"""The end of a supervisor and its engine, together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_common.child_process.start import ChildProcess
from penstock_shard.config import ShardConfig
from penstock_shard.server.supervisor import EngineFailed, EngineSupervisor


class Process:
    """Ends when the test says so."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.left = asyncio.Event()
        self.writer: Any = SimpleNamespace(write=lambda data: None, close=self.left.set)
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        raise AssertionError("it is killed")

    async def wait(self) -> int:
        return await self.status


async def test_an_engine_that_never_was_ready_counts_as_one_that_died() -> None:
    async def start() -> ChildProcess:
        process = Process()
        process.reader.feed_eof()
        process.status.set_result(1)
        return ChildProcess(process.reader, process.writer, process.kill, process.wait)

    supervisor = EngineSupervisor(ShardConfig(max_restarts=1), start)
    with pytest.raises(EngineFailed):
        await supervisor.run()
    counted = "penstock_shard_engine_restarts_total"
    assert supervisor.metrics.registry.get_sample_value(counted) == 1


async def test_a_supervisor_that_is_cancelled_while_its_engine_ends_starts_no_other() -> None:
    started: list[Process] = []

    async def start() -> ChildProcess:
        process = Process()
        started.append(process)
        return ChildProcess(process.reader, process.writer, process.kill, process.wait)

    running = asyncio.create_task(EngineSupervisor(ShardConfig(), start).run())
    while not started:
        await asyncio.sleep(0)
    started[0].reader.feed_eof()
    await started[0].left.wait()
    await asyncio.sleep(0)
    started[0].status.set_result(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):
            await running
    assert len(started) == 1


async def test_waits_before_restarts_double_and_are_none_after_an_engine_that_worked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = EngineSupervisor(ShardConfig(max_restarts=5))
    worked = iter([False, False, True, True, False, False, False, False, False])

    async def run_once() -> str:
        supervisor._worked = next(worked)
        return "it ended"

    monkeypatch.setattr(supervisor, "_run_once", run_once)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: _nothing())
    with pytest.raises(EngineFailed, match="5 engines failed in a row"):
        await supervisor.run()
    said = [record.args for record in caplog.records if "again in" in record.getMessage()]
    assert said == [(wait_s,) for wait_s in (0.25, 0.5, 0.0, 0.0, 0.25, 0.5, 1.0, 2.0)]


async def _nothing() -> None:
    """Takes the place of a wait."""
