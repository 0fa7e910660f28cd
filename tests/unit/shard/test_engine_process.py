"""The spare engine process."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from penstock_common.child_process.start import ChildProcess
from penstock_shard.server.engine_process import Standby


class Processes:
    """Makes processes that do nothing, and remembers what was done to them."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.killed: list[int] = []
        self.readers: list[asyncio.StreamReader] = []
        self.error: OSError | None = None

    async def plain(self) -> ChildProcess:
        return self._make("plain")

    async def spare(self) -> ChildProcess:
        if self.error is not None:
            raise self.error
        return self._make("spare")

    def _make(self, kind: str) -> ChildProcess:
        number = len(self.made)
        self.made.append(kind)
        self.readers.append(asyncio.StreamReader())

        class Writer:
            def close(self) -> None:
                """Do nothing, because nothing is written."""

        async def wait() -> int:
            return -9

        writer = cast("Any", Writer())
        return ChildProcess(self.readers[-1], writer, lambda: self.killed.append(number), wait)


@pytest.fixture
def processes() -> Processes:
    return Processes()


async def test_a_spare_takes_over_and_without_one_a_process_is_started(
    processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    standby = Standby(processes.plain, processes.spare)
    await standby.take()
    assert processes.made == ["plain"]
    await standby.prepare()
    await standby.prepare()
    assert processes.made == ["plain", "spare"]
    taken = await standby.take()
    assert taken.reader is processes.readers[1]
    assert "the spare engine process takes over" in caplog.text
    assert processes.made == ["plain", "spare"]
    await standby.take()
    assert processes.made == ["plain", "spare", "plain"]
    assert processes.killed == []


async def test_a_spare_that_has_ended_is_no_spare(
    processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    standby = Standby(processes.plain, processes.spare)
    await standby.prepare()
    processes.readers[0].feed_eof()
    taken = await standby.take()
    assert taken.reader is processes.readers[1]
    assert processes.made == ["spare", "plain"]
    assert "the spare engine process has ended" in caplog.text
    # Whatever is left of it.
    assert processes.killed == [0]


async def test_a_spare_that_cannot_be_started_costs_a_line(
    processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    processes.error = OSError(12, "Cannot allocate memory")
    standby = Standby(processes.plain, processes.spare)
    await standby.prepare()
    assert "no spare engine process: [Errno 12] Cannot allocate memory" in caplog.text
    await standby.take()
    assert processes.made == ["plain"]


async def test_a_spare_ends_with_the_server(processes: Processes) -> None:
    standby = Standby(processes.plain, processes.spare)
    await standby.prepare()
    await standby.close()
    await standby.close()
    assert processes.killed == [0]
