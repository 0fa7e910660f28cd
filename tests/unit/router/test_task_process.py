"""The router's end of a process that does tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock_common.child_process.framing import HEADER_BYTES, encode_frame
from penstock_router.task_process import TaskProcess

# Sends what it is told, as it is.
_ECHO = """
import sys
from penstock_common.child_process.child_end import stream_to_parent
from penstock_common.child_process.framing import receive_frame
import msgspec
with stream_to_parent(*sys.argv[1:]) as stream:
    while message := receive_frame(stream.read):
        stream.write(msgspec.msgpack.decode(message))
        stream.flush()
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskProcess:
    (tmp_path / "echo_of_tasks.py").write_text(_ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    return TaskProcess("echo_of_tasks", "info", "text")


async def test_a_message_comes_back_whole_and_the_loop_turns_meanwhile(echo: TaskProcess) -> None:
    message = bytes(5_000_000)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await echo.send(encode_frame(encode_frame(message)))
    assert msgspec.msgpack.decode(await echo.receive_message()) == message
    counting.cancel()
    assert turns > 10
    assert echo.is_alive
    assert await echo.kill() == -9


async def test_what_is_no_message_counts_as_the_end_of_the_process(
    echo: TaskProcess, caplog: pytest.LogCaptureFixture
) -> None:
    garbled = bytearray(encode_frame("message"))
    garbled[HEADER_BYTES - 1] ^= 1
    await echo.send(encode_frame(bytes(garbled)))
    with pytest.raises(EOFError):
        await echo.receive_message()
    assert "is no length" in caplog.text
    await echo.kill()
