"""A child process: how it starts, what it leaves to its parent, and that it ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.processes import wait_until

from penstock_common.child_process.child_end import NICENESS
from penstock_common.child_process.start import start_beside, start_child

# Answers with what it is asked, or works without end.
_TASKS = """
import sys, time
from penstock_common.child_process.child_end import stream_to_parent
with stream_to_parent(*sys.argv[1:]) as stream:
    while task := stream.read(4):
        stream.write(task)
        stream.flush()
        while task == b"work":
            pass
        if task == b"wait":
            time.sleep(600)
"""


@pytest.fixture
def tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that does tasks, and its socket."""
    (tmp_path / "does_tasks.py").write_text(_TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    process, ours = start_beside("does_tasks", "info", "text")
    ours.settimeout(30)
    assert _asked(ours, b"here") == b"here"
    return process, ours


def _asked(ours: socket.socket, task: bytes) -> bytes:
    ours.sendall(task)
    return ours.recv(4)


@pytest.mark.parametrize("task", [b"idle", b"work", b"wait"])
def test_a_child_ends_with_its_parent_even_within_a_task(
    tasks: tuple[subprocess.Popen[bytes], socket.socket], task: bytes
) -> None:
    process, ours = tasks
    with process, ours:
        assert _asked(ours, task) == task
        ours.close()
        assert process.wait(20) == 0


def test_a_child_leaves_signals_to_its_parent(
    tasks: tuple[subprocess.Popen[bytes], socket.socket],
) -> None:
    process, ours = tasks
    with process, ours:
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            assert _asked(ours, b"more") == b"more"
        ours.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_child_that_does_tasks_gives_way_to_its_parent(
    tasks: tuple[subprocess.Popen[bytes], socket.socket],
) -> None:
    process, ours = tasks
    with process, ours:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert psutil.Process(process.pid).nice() == min(19, own + NICENESS)
        own, its = (
            int(Path(f"/proc/{each}/oom_score_adj").read_text()) for each in ("self", process.pid)
        )
        assert its == min(1000, own + 500)
        # It is of its parent's session, as the parent's other children are.
        assert os.getsid(process.pid) == os.getsid(0)
        ours.close()


async def test_a_child_has_as_many_sockets_as_are_asked_for_and_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import os, socket, sys
*fds, given, word = sys.argv[1:]
for fd in fds:
    socket.socket(fileno=int(fd)).sendall(f"{word} {os.environ}".encode())
os.write(int(given), b"!")
"""
    (tmp_path / "has_sockets.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOT_FOR_IT", "secret")
    monkeypatch.setenv("FOR_IT", "wanted")
    reading, writing = os.pipe()
    child = await start_child(
        "has_sockets",
        "FOR_IT",
        added={"ADDED": "too"},
        arguments=[str(writing), "word"],
        descriptors=[writing],
        num_sockets=3,
    )
    os.close(writing)
    streams = [(child.reader, child.writer), *child.more]
    said = [(await reader.read()).decode() for reader, _ in streams]
    assert len(said) == 3
    for text in said:
        assert text.startswith("word ")
        assert "wanted" in text
        assert "ADDED" in text
        assert "secret" not in text
    assert os.read(reading, 2) == b"!"
    os.close(reading)
    assert await child.wait() == 0
    for _, writer in streams:
        writer.close()
        await writer.wait_closed()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
async def test_a_child_that_cannot_be_started_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        await start_child("module", python="/nowhere/python", num_sockets=3)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        start_beside("module")
    # asyncio's own may have come.
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


async def test_a_session_s_child_ends_with_its_parent_within_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import os, socket, sys, time
from penstock_common.child_process.child_end import end_with, leave_signals_to_parent
leave_signals_to_parent()
parent = socket.socket(fileno=int(sys.argv[1]))
end_with(parent, lambda: os._exit(5))
parent.sendall(b"!")
time.sleep(600)
"""
    (tmp_path / "sleeps.py").write_text(program)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    monkeypatch.setenv("PYTHONPATH", path)
    child = await start_child("sleeps")
    assert await child.reader.readexactly(1) == b"!"
    [process] = [each for each in psutil.Process().children() if "sleeps" in each.cmdline()]
    assert os.getsid(process.pid) == process.pid
    # What was sent and never read is no reason to stay.
    child.writer.write(b"unread")
    child.writer.close()
    async with asyncio.timeout(20):
        assert await child.wait() == 5
    wait_until(lambda: not process.is_running(), timeout_s=5, what="the end of the process")
