"""Several workers: how the parent passes the end on, with workers that only pretend to serve."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.budget import in_soak

from penstock_client.audit_log import AuditRecord
from penstock_common.shared_flags import USAGE_STATUS
from penstock_proto.types import GenerationRequest
from penstock_router.config import RouterConfig
from penstock_router.observe.metrics import Metrics
from penstock_router.workers import (
    FirstWorker,
    _config_of,
    _open_audit_log,
    _until_ready,
    run,
)

# The module is imported again in each worker, as `__mp_main__`.
SCRIPT = """
import os, pathlib, sys, time
from penstock_router import workers
from penstock_router.config import RouterConfig

workers._RESTART_DELAY_S = 0.1
folder, start_s, work_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])

def note(what):
    with open(folder + "/notes", "a") as file:
        file.write(what + "\\n")

def serve(config, lifeline, first, serving):
    note("up")
    fault = pathlib.Path(folder, "fault")
    if fault.exists():
        sys.exit(int(fault.read_text()))
    if work_s < 0:
        sys.exit(int(-work_s))
    serving.send_bytes(b"!")
    note("serves")
    note(str(os.getpid()))
    if work_s == 99:
        sys.exit(1)
    lifeline.poll(None)
    note("told")
    if work_s != 98:
        time.sleep(work_s)
    note("done")

workers._worker_main = serve
start = workers._Parent._start

def start_one(self, index, **more):
    if index == 1 and pathlib.Path(folder, "full").exists():
        note("full")
        raise OSError(11, "Resource temporarily unavailable")
    worker = start(self, index, **more)
    note("started")
    return worker

workers._Parent._start = start_one
if __name__ == "__main__":
    note("parent")
    log = sys.argv[4] or None
    config = RouterConfig("a:1", port=0, workers=2, shutdown_timeout_s=60.0, audit_log=log)
    sys.exit(workers.run(config))
time.sleep(start_s)
"""


class Parent:
    def __init__(
        self, folder: Path, start_s: float, work_s: float, log: str = "", *, heard: bool = False
    ) -> None:
        script = folder / "script.py"
        script.write_text(SCRIPT)
        self.notes_file = folder / "notes"
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(start_s), str(work_s), log],
            start_new_session=True,
            stderr=subprocess.PIPE if log or heard else None,
            text=True,
        )

    def notes(self) -> list[str]:
        return self.notes_file.read_text().split() if self.notes_file.exists() else []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[float, float], Parent]]:
    started: list[Parent] = []

    def start(start_s: float, work_s: float) -> Parent:
        started.append(Parent(tmp_path, start_s, work_s))
        return started[-1]

    yield start
    for parent in started:
        try:
            os.killpg(parent.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        parent.process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [in_soak(signal.SIGINT), signal.SIGTERM])
def test_a_signal_to_the_whole_group_lets_workers_finish(
    start: Callable[[float, float], Parent], number: int
) -> None:
    parent = start(0, 0.5)
    wait_for(lambda: parent.notes().count("up") == 2)
    os.killpg(parent.process.pid, number)
    assert parent.process.wait(30) == 0
    assert parent.notes().count("done") == 2


def test_a_second_signal_to_the_parent_ends_workers_at_once(
    start: Callable[[float, float], Parent],
) -> None:
    parent = start(0, 100)
    wait_for(lambda: parent.notes().count("up") == 2)
    parent.process.terminate()
    # Only then is the next one a second.
    wait_for(lambda: parent.notes().count("told") == 2)
    assert parent.process.poll() is None
    parent.process.terminate()
    assert parent.process.wait(30) == 1
    wait_for(lambda: not group_lives(parent.process.pid))


def test_a_signal_while_workers_start_is_an_ordinary_end(
    start: Callable[[float, float], Parent],
) -> None:
    parent = start(1.0, 0)
    wait_for(lambda: "started" in parent.notes())
    os.killpg(parent.process.pid, signal.SIGTERM)
    assert parent.process.wait(30) == 0


def test_workers_end_when_the_parent_is_killed(start: Callable[[float, float], Parent]) -> None:
    parent = start(0, 0)
    wait_for(lambda: parent.notes().count("up") == 2)
    parent.process.kill()
    parent.process.wait()
    wait_for(lambda: parent.notes().count("done") == 2)


def test_an_audit_log_that_a_worker_could_not_write_is_one_line_and_the_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "audit-worker1").write_text("something else\n")
    (tmp_path / "audit-worker1").chmod(0o600)
    parent = Parent(tmp_path, 0, 0, str(tmp_path / "audit"))
    _, error = parent.process.communicate(timeout=30)
    assert parent.process.returncode == 2
    [line] = error.splitlines()
    path = tmp_path / "audit-worker1"
    assert line == (
        f"penstock router: --audit-log: audit log {path}: the file there is no audit log"
    )
    assert parent.notes() == ["parent"]


def test_records_that_an_audit_log_drops_are_counted(tmp_path: Path) -> None:
    metrics = Metrics()
    config = RouterConfig(shards="a:1", audit_log=str(tmp_path / "audit"))
    audit = _open_audit_log(config, metrics)
    assert audit is not None
    audit.close()
    # It is closed, and takes no more.
    audit.record(AuditRecord("r", GenerationRequest([1])))
    assert metrics.registry.get_sample_value("penstock_router_audit_dropped_total") == 1


def test_a_worker_that_never_gets_to_serve_is_given_up_with_a_line(tmp_path: Path) -> None:
    parent = Parent(tmp_path, 0, -7, heard=True)
    _, error = parent.process.communicate(timeout=60)
    assert parent.process.returncode == 2
    *restarts, last = error.splitlines()
    assert "ended with status 7, 3 times before it could serve" in last
    assert all("ended with status 7" in line for line in restarts)
    assert "Traceback" not in error
    assert 4 <= parent.notes().count("up") <= 6


def test_a_worker_that_refuses_to_start_has_said_why_and_is_not_started_again(
    tmp_path: Path,
) -> None:
    parent = Parent(tmp_path, 0, -2, heard=True)
    _, error = parent.process.communicate(timeout=30)
    assert (parent.process.returncode, error) == (2, "")
    assert parent.notes().count("up") == 2


def test_a_worker_that_has_served_is_started_again_as_often_as_it_ends(
    start: Callable[[float, float], Parent],
) -> None:
    parent = start(0, 99)
    # Were they counted as failed, two workers would have three starts each.
    wait_for(lambda: parent.notes().count("up") >= 7)
    assert parent.process.poll() is None


@pytest.mark.parametrize(("status", "starts"), [in_soak(1, 6), (USAGE_STATUS, 4)])
def test_a_worker_that_served_once_and_cannot_start_for_a_while_ends_no_other(
    start: Callable[[float, float], Parent], tmp_path: Path, status: int, starts: int
) -> None:
    fault = tmp_path / "fault"
    parent = start(0, 98)
    wait_for(lambda: parent.notes().count("serves") == 2)
    fault.write_text(f"{status}")
    pid = next(int(note) for note in parent.notes() if note.isdigit())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: parent.notes().count("up") >= starts)
    fault.unlink()
    wait_for(lambda: parent.notes().count("serves") == 3)
    parent.process.terminate()
    assert parent.process.wait(30) == 0


def test_a_worker_that_the_system_cannot_start_is_one_line_and_the_end(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    parent = Parent(tmp_path, 0, 0, heard=True)
    try:
        _, error = parent.process.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.process.pid, signal.SIGKILL)
    assert parent.process.returncode == 2
    assert error == "penstock router: cannot start a worker: Resource temporarily unavailable\n"


def test_a_worker_that_the_system_cannot_start_again_at_once_is_started_later(
    start: Callable[[float, float], Parent], tmp_path: Path
) -> None:
    parent = start(0, 98)
    wait_for(lambda: parent.notes().count("serves") == 2)
    (tmp_path / "full").touch()
    for pid in [int(note) for note in parent.notes() if note.isdigit()]:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: parent.notes().count("serves") == 3)
    wait_for(lambda: parent.notes().count("full") >= 3)
    (tmp_path / "full").unlink()
    wait_for(lambda: parent.notes().count("serves") == 4)
    parent.process.terminate()
    assert parent.process.wait(30) == 0


async def test_a_worker_that_is_told_to_end_waits_no_longer_for_a_shard() -> None:
    first = FirstWorker(is_here=False, can_serve=multiprocessing.Event())
    models: Any = SimpleNamespace(not_ready_because="no shard is ready")
    stop = asyncio.Event()
    waiting = asyncio.create_task(_until_ready(models, first, stop))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    stop.set()
    async with asyncio.timeout(30):
        await waiting


def test_bounds_are_shared_out_over_workers() -> None:
    config = RouterConfig(
        "a:1",
        workers=3,
        max_concurrent_requests=10,
        max_queued_requests=2,
        max_queued_tokens=1000,
        max_concurrent_requests_per_key=4,
        max_queued_requests_per_key=None,
        audit_log="log",
    )
    parts = [_config_of(config, index) for index in range(3)]
    assert [part.max_concurrent_requests for part in parts] == [4, 3, 3]
    assert [part.max_queued_requests for part in parts] == [1, 1, 0]
    assert [part.max_queued_tokens for part in parts] == [334, 333, 333]
    assert [part.max_concurrent_requests_per_key for part in parts] == [2, 1, 1]
    assert {part.max_queued_requests_per_key for part in parts} == {None}
    assert [part.audit_log for part in parts] == ["log-worker0", "log-worker1", "log-worker2"]


@pytest.mark.parametrize("host", ["no.invalid", "a" * 70])
def test_a_host_that_is_no_host_is_one_line_and_status_2(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(RouterConfig("a:1", host=host)) == USAGE_STATUS
    line = capsys.readouterr().err
    assert line.startswith(f"penstock router: cannot listen on {host}:8000: ")
    assert line.endswith("; choose another --port or --host\n")
    assert line.count("\n") == 1
