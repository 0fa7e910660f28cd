"""Tasks that outlive errors which nobody foresaw."""

from __future__ import annotations

import asyncio

import pytest

from penstock_common.tasks import run_lasting


async def test_work_that_fails_is_logged_and_done_again_until_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = [ZeroDivisionError("first"), KeyError("second")]

    async def work() -> None:
        if left:
            raise left.pop(0)

    await run_lasting(work, "counting", pause_s=0.0)
    assert [record.message for record in caplog.records] == [
        "counting failed; trying again in 0 s",
        "counting failed; trying again in 0 s",
    ]
    assert "ZeroDivisionError: first" in caplog.text


async def test_whoever_cancels_it_ends_it_at_work_and_in_a_pause() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def failing() -> None:
        begun.set()
        raise ZeroDivisionError

    for doing in (work, failing):
        begun.clear()
        task = asyncio.create_task(run_lasting(doing, "waiting"))
        await begun.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
