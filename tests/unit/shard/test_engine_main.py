"""The engine process: what it says while it loads, its beats and ends, and its checks when idle."""

from __future__ import annotations

import queue
import struct
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.engines import make_engine, make_request

from penstock_shard.config import ShardConfig
from penstock_shard.engine import run_engine as engine_process
from penstock_shard.engine.adapter_slots import EngineAdapters
from penstock_shard.engine.loop import EngineLoop, Heartbeat
from penstock_shard.errors import ModelError
from penstock_shard.ipc.messages import Inbox
from penstock_shard.model_loader.load_runner import load_runner


def _beats(sleeps_s: list[float], started_s: Callable[[float], float]) -> list[float]:
    """Return the age of the running step, in seconds, that each beat tells. `sleeps_s` lie between
    the beats; `started_s` maps a time to the start of the step that runs then.
    """
    clock = SimpleNamespace(now_s=100.0)

    class Loop:
        step_expected_s = 0.1

        @property
        def running_since_s(self) -> float:
            return started_s(clock.now_s)

    heartbeat = Heartbeat(Loop(), lambda: clock.now_s)  # type: ignore[arg-type]
    said = [heartbeat.beat().step_running_s]
    for slept_s in sleeps_s:
        clock.now_s += slept_s
        said.append(heartbeat.beat().step_running_s)
    return said


def test_a_model_that_cannot_go_on_ends_the_engine_with_a_line_and_no_stack(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModelError("rank 0 could not compute a step; lower --max-num-batched-tokens")

    monkeypatch.setattr(engine_process, "_run", fail)
    nothing: Any = None
    assert engine_process._run_or_say(nothing, nothing) == 1
    (record,) = caplog.records
    assert record.levelname == "CRITICAL"
    assert record.getMessage().endswith("lower --max-num-batched-tokens")
    assert record.exc_info is None


def test_a_step_grows_older_with_each_beat() -> None:
    said = _beats([0.25] * 100, lambda now_s: 100.0)
    assert said == pytest.approx([0.25 * index for index in range(101)])


def test_time_in_which_the_process_was_stopped_is_not_the_step_s() -> None:
    said = _beats([0.25, 60.0, 0.25, 0.25], lambda now_s: 100.0)
    assert max(said) < 2.5
    assert said[-1] > said[-2]


def test_a_step_that_began_just_before_the_stop_is_excused_and_the_next_is_not() -> None:
    def started_s(now_s: float) -> float:
        return 100.0 if now_s < 100.2 else 100.1 if now_s < 161 else 161.0

    said = _beats([0.25, 60.0, 0.25, 0.6, *[0.25] * 20], started_s)
    assert max(said[:4]) < 2.5
    assert said[-1] > 4.0


def test_what_goes_on_outside_of_steps_grows_older_too_and_waiting_does_not() -> None:
    clock = SimpleNamespace(now_s=100.0)
    adapters = EngineAdapters(None, 0, lambda: None)
    engine = make_engine().engine
    loop = EngineLoop(engine, adapters, lambda message: None, clock=lambda: clock.now_s)
    heartbeat = Heartbeat(loop, lambda: clock.now_s)
    clock.now_s += 0.5
    assert heartbeat.beat().step_running_s == 0
    loop.take(Inbox([], []))
    clock.now_s += 0.5
    assert heartbeat.beat().step_running_s == 0.5
    loop.launch()
    loop.collect()
    clock.now_s += 0.5
    assert heartbeat.beat().step_running_s == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        struct.pack("<II", 1, 2**32 - 2) + b"\xc1",
        struct.pack("<II", 2**31 + 1, 2**32 - 2) + b"\xc0",
    ],
    ids=["a message that is none", "a length that nobody sent"],
)
def test_an_engine_ends_that_its_server_tells_nonsense(nonsense: bytes) -> None:
    program = f"""
import queue, socket, threading, time
from penstock_common.logs import set_up_logging
from penstock_shard.engine import run_engine as engine_process
from penstock_shard.ipc.messages import EngineEnd

ours, theirs = socket.socketpair()
set_up_logging("text")
ours.sendall({nonsense!r})
arguments = (EngineEnd(theirs), queue.SimpleQueue())
threading.Thread(target=engine_process._receive, args=arguments, daemon=True).start()
time.sleep(60)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 0
    [line] = ended.stderr.splitlines()
    assert "cannot be decoded" in line


def test_a_dead_engine_waits_for_nobody_that_still_reads_or_compiles() -> None:
    program = """
import time
from concurrent.futures import ThreadPoolExecutor
from penstock_shard.engine import main as engine_main

def fail():
    ThreadPoolExecutor(1).submit(time.sleep, 60)
    raise RuntimeError("a step went wrong")

engine_main.main = fail
engine_main.run()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    assert "a step went wrong" in ended.stderr


def test_the_seconds_that_torch_takes_to_import_are_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    stub = ModuleType("penstock_shard.model_loader.load_model_runner")

    def load_model_runner(*_: object, **__: object) -> None:
        raise ModelError("; ".join(said))

    stub.load_model_runner = load_model_runner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    with pytest.raises(ModelError, match="importing torch"):
        load_runner(ShardConfig(), said.append)


class _Idle(Exception):
    """The engine waits for a message."""


def _run_until_idle(damage: bool, checks: bool) -> None:
    under_test = make_engine()
    under_test.engine.submit(make_request())

    def get(*, block: bool, timeout: float | None) -> Inbox:
        if block:
            raise _Idle
        if damage:
            under_test.blocks._pools[0]._references[3] += 1
        raise queue.Empty

    adapters = EngineAdapters(None, 0, lambda: None)
    loop = EngineLoop(under_test.engine, adapters, lambda message: None, checks=checks)
    engine_process._run(loop, SimpleNamespace(get=get))  # type: ignore[arg-type]


@pytest.mark.parametrize(("damage", "checks"), [(False, True), (False, False), (True, False)])
def test_an_idle_engine_whose_counts_agree_or_that_is_not_to_check_waits_for_requests(
    damage: bool, checks: bool
) -> None:
    with pytest.raises(_Idle):
        _run_until_idle(damage, checks)


def test_an_idle_engine_that_checks_ends_with_the_difference_where_its_counts_disagree() -> None:
    with pytest.raises(AssertionError, match=r"blocks \[3\]: counted \[0\] .* kept \[\d+\]"):
        _run_until_idle(damage=True, checks=True)
