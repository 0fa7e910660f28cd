"""Processes that an engine process started: they end with it, whoever ends it and however."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock_common.child_process import process_group
from penstock_common.child_process.process_group import ProcessesRemain, end_group
from penstock_common.child_process.start import ChildProcess, start_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

# Starts a process of its own, one that leaves it too, says who they are, and waits for its link.
_WITH_FAMILY = """
import socket, subprocess, sys
child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {then}"
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
one = subprocess.Popen([sys.executable, "-c", child.format(sleep=sleep, then="time.sleep(600)")])
two = subprocess.Popen([sys.executable, "-c", child.format(sleep=sleep, then="pass")])
two.wait()
link = socket.socket(fileno=int(sys.argv[1]))
link.sendall(b"here")
link.recv(1)
sys.exit(3)
"""


async def start_family(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ChildProcess, int]:
    """Start a child with three descendants. Returns the child and its group."""
    (folder / "with_family.py").write_text(_WITH_FAMILY)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    before = set(psutil.Process().children())
    child = await start_child("with_family")
    assert await child.reader.readexactly(4) == b"here"
    (leader,) = set(psutil.Process().children()) - before
    async with asyncio.timeout(10):
        # One may be a process already, and another of them still to be started.
        while len(members_of(leader.pid)) < 4:
            await asyncio.sleep(0.02)
    return child, leader.pid


def check_over(child: ChildProcess, group: int) -> None:
    """Close our end of the child's link, and check that only zombies of its group are left."""
    child.writer.transport.abort()
    assert [pid for pid in members_of(group) if psutil.Process(pid).status() != "zombie"] == []


def members_of(group: int) -> list[int]:
    """Return the ids of all processes in a group, also of zombies."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == group:
                found.append(pid)
        except ProcessLookupError:
            pass
    return found


async def test_what_a_child_started_ends_when_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, group = await start_family(tmp_path, monkeypatch)
    child.kill()
    async with asyncio.timeout(20):
        assert await child.wait() == -signal.SIGKILL
    check_over(child, group)


@pytest.mark.parametrize("how", ["by itself", "by somebody else"])
async def test_what_a_child_started_ends_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    child, group = await start_family(tmp_path, monkeypatch)
    if how == "by itself":
        child.writer.close()
    else:
        os.kill(group, signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await child.wait() == (3 if how == "by itself" else -signal.SIGKILL)
        # It may be asked again.
        await child.wait()
    check_over(child, group)


def test_a_process_that_adopts_orphans_reaps_them(tmp_path: Path) -> None:
    (tmp_path / "with_family.py").write_text(_WITH_FAMILY)
    program = """
import asyncio
from penstock_common.child_process.start import start_child
from penstock_common.child_process.process_group import adopt_orphans
async def main():
    child = await start_child("with_family")
    await child.reader.readexactly(4)
    child.kill()
    await child.wait()
adopt_orphans()
asyncio.run(main())
import psutil
print(psutil.Process().children(recursive=True))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert said.stdout.strip() == "[]", said.stderr


def test_a_process_that_ends_while_they_are_listed_is_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0
    )

    def end_and_list(group: int) -> list[int]:
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        return []

    monkeypatch.setattr(process_group, "_living", end_and_list)
    asyncio.run(end_group(one.pid))
    with pytest.raises(ChildProcessError):
        os.waitpid(one.pid, os.WNOHANG)
    assert one.stdin is not None
    one.stdin.close()
    one.returncode = -signal.SIGKILL


async def test_what_does_not_end_is_named_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_reap_and_list", lambda group: [group + 1, group])
    monkeypatch.setattr(process_group, "_kill", lambda processes, and_trackers: None)
    with pytest.raises(ProcessesRemain, match=r"did not end in 0\.1 s: 7, 8"):
        await end_group(7, 0.1)


async def test_shared_memory_of_killed_processes_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import socket, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
socket.socket(fileno=int(sys.argv[1])).sendall(memory.name.encode().ljust(32))
time.sleep(600)
"""
    (tmp_path / "with_memory.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = await start_child("with_memory")
    name = (await child.reader.readexactly(32)).decode().strip()
    assert name in os.listdir("/dev/shm")
    (leader,) = [each for each in psutil.Process().children() if "with_memory" in each.cmdline()]
    async with asyncio.timeout(20):
        # It has begun once it is a program of its own.
        while not any(map(process_group._is_tracker, members_of(leader.pid))):
            await asyncio.sleep(0.01)
        child.kill()
        await child.wait()
    child.writer.transport.abort()
    assert name not in os.listdir("/dev/shm")
