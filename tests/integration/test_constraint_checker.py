"""The process that tries constraints out, and the server's end of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
from support.processes import is_alive, wait_until

from penstock_proto.types import Constraint
from penstock_shard.config import ShardConfig
from penstock_shard.structured_output import checker as checker_module
from penstock_shard.structured_output.check_messages import Answer, Check, patience_s
from penstock_shard.structured_output.checker import (
    CheckFailed,
    ConstraintChecker,
    NotChecked,
    _CheckProcess,
)

TOKENIZER = Path(__file__).parents[2] / "shard/penstock_shard/builtin_model/tokenizer.json"
VOCAB_SIZE = 3072
# Fine, and some work.
LARGE = Constraint("regex", "|".join(f"word{n}" for n in range(25_000)))
# Joined once: it takes as long as a part of the check.
_WORDS = "|".join(f"word{n}of" for n in range(80_000))


def _doubling(count: int) -> Constraint:
    """Return a grammar in which each rule is twice the next one: the library recurses into them,
    and its stack grows.
    """
    rules = [f"r{n}: r{n + 1} r{n + 1}" for n in range(count)]
    return Constraint("grammar", "\n".join(["start: r0", *rules, f'r{count}: "a"']))


def _regex(text: str) -> Constraint:
    return Constraint("regex", text)


@contextlib.asynccontextmanager
async def _checker(**settings: float) -> AsyncIterator[ConstraintChecker]:
    config = ShardConfig(**settings)  # type: ignore[arg-type]
    checker = ConstraintChecker(config.constraint_limits)
    checker.use(TOKENIZER.read_bytes(), VOCAB_SIZE, (0,))
    try:
        yield checker
    finally:
        await checker.close()
        assert _processes() == []


def _processes() -> list[psutil.Process]:
    module = "penstock_shard.structured_output.check_process"
    children = psutil.Process().children()
    return [child for child in children if is_alive(child) and module in child.cmdline()]


def _lanes(process: psutil.Process) -> list[psutil.Process]:
    """The processes of an idle check process, itself the first."""

    def all_of_them() -> list[psutil.Process]:
        return [process, *filter(is_alive, process.children(recursive=True))]

    count = checker_module._NUM_LANES
    wait_until(lambda: len(all_of_them()) == count, timeout_s=30, what="lanes without forks")
    return all_of_them()


def _forks(lanes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that check a constraint now."""
    children = lanes[0].children(recursive=True)
    return [child for child in children if child not in lanes and is_alive(child)]


async def test_a_good_constraint_has_nothing_against_it_and_a_bad_one_has_a_reason() -> None:
    async with _checker() as checker:
        assert await checker.check(_regex("[ab]+")) == ""
        assert "regex" in await checker.check(_regex("(["))
        assert await checker.check(Constraint("json_schema", '{"type": "object"}')) == ""
        assert "json_schema" in await checker.check(Constraint("json_schema", '{"type": '))


async def test_the_process_is_there_before_the_first_constraint_comes() -> None:
    async with _checker() as checker:
        async with asyncio.timeout(30):
            while checker._process is None:
                await asyncio.sleep(0.01)
        assert len(_processes()) == 1


async def test_a_verdict_is_known_after_its_check_and_only_for_that_text() -> None:
    async with _checker() as checker:
        assert checker.known(_regex("a")) is None
        await checker.check(_regex("a"))
        assert checker.known(_regex("a")) == ""
        assert checker.known(Constraint("grammar", "a")) is None
        assert checker.known(Constraint("choice", options=("a", "b"))) is None
        await checker.check(_regex("(["))
        assert checker.known(_regex("(["))


async def test_equal_constraints_share_one_check() -> None:
    async with _checker() as checker:
        waiting = [asyncio.create_task(checker.check(LARGE)) for _ in range(400)]
        await asyncio.sleep(0)
        assert len(checker._pending) == 1
        assert set(await asyncio.gather(*waiting)) == {""}
        assert len(checker._pending) == 0


async def test_verdicts_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "_MAX_VERDICTS", 2)
    async with _checker() as checker:
        for name in "abac":
            if checker.known(_regex(name)) is None:
                await checker.check(_regex(name))
        assert [checker.known(_regex(name)) for name in "abc"] == ["", None, ""]


async def test_a_queue_that_is_full_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "_MAX_PENDING", 32)
    async with _checker() as checker:
        waiting = [asyncio.create_task(checker.check(_regex(f"a{number}"))) for number in range(16)]
        await asyncio.sleep(0)
        with pytest.raises(NotChecked, match="16 constraints wait"):
            await checker.check(_regex("b"))
        assert set(await asyncio.gather(*waiting)) == {""}
        assert await checker.check(_regex("b")) == ""


async def test_what_nobody_waits_for_any_more_leaves_the_queue() -> None:
    async with _checker() as checker:
        running = [
            asyncio.create_task(checker.check(_regex(LARGE.value + str(number))))
            for number in range(checker_module._NUM_LANES)
        ]
        others = [asyncio.create_task(checker.check(_regex("a"))) for _ in range(2)]
        await asyncio.sleep(0)
        others[0].cancel()
        await asyncio.sleep(0)
        assert len(checker._pending) == len(running) + 1
        others[1].cancel()
        await asyncio.sleep(0)
        assert len(checker._pending) == len(running)
        assert await asyncio.gather(*running) == [""] * len(running)


async def _patient_check(checker: ConstraintChecker, constraint: Constraint) -> str:
    """Again where the machine does too much besides."""
    for _ in range(50):
        with contextlib.suppress(NotChecked):
            return await checker.check(constraint)
    raise AssertionError("it is never checked")


async def test_one_that_takes_too_long_is_refused_and_that_is_remembered() -> None:
    async with _checker(constraint_timeout_s=0.02) as checker:
        reason = "regex: needs more than 0.02 s to compile (--constraint-timeout-s)"
        assert await _patient_check(checker, LARGE) == reason
        assert checker.known(LARGE) == reason
        assert await checker.check(_regex("a")) == ""


@contextlib.asynccontextmanager
async def _slow_checker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ConstraintChecker]:
    """Yield a checker whose first attempt at a check has 0.01 s: too little for `_slow`."""
    monkeypatch.setattr(checker_module, "_FIRST_S", 0.01)
    async with _checker(constraint_timeout_s=5.0) as checker:
        await checker.check(_regex("a"))
        yield checker


def _slow(number: int) -> Constraint:
    """Takes a fifth of a second of processor time."""
    return _regex(f"{number}|{_WORDS}")


class _Order:
    """The order in which a checker begins its checks. No process computes: each check takes a few
    turns of the event loop. A constraint is slow if its name contains "slow".
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.most_long = 0
        self._num_long = 0
        monkeypatch.setattr(_CheckProcess, "answer_to", self._answer_to)

    async def _answer_to(self, check: Check, lane: int) -> Answer:
        name, is_long = check.constraint.value, check.timeout_s > checker_module._FIRST_S
        self.begun.append(f"all of {name}" if is_long else name)
        self._num_long += is_long
        self.most_long = max(self.most_long, self._num_long)
        for _ in range(10 if is_long else 2):
            await asyncio.sleep(0)
        self._num_long -= is_long
        return Answer("", -signal.SIGPROF if "slow" in name and not is_long else 0)

    def before(self, name: str) -> list[str]:
        """Return the checks that were begun before this one."""
        return self.begun[: self.begun.index(name)]


@contextlib.asynccontextmanager
async def _ordered(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[ConstraintChecker, _Order]]:
    async with _checker() as checker:
        await checker.check(_regex("a"))
        order = _Order(monkeypatch)
        yield checker, order
        assert order.most_long <= 1


def _ask(
    checker: ConstraintChecker, *names: str, caller: str | None = None
) -> list[asyncio.Task[str]]:
    return [asyncio.create_task(checker.check(_regex(name), caller)) for name in names]


async def test_slow_constraints_of_one_call_delay_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _ordered(monkeypatch) as (checker, order):
        slow = _ask(checker, *(f"slow {n}" for n in range(12)), caller="slow")
        await asyncio.sleep(0)
        for number in range(10):
            begun = len(order.begun)
            assert await checker.check(_regex(f"b{number}"), "other") == ""
            between = order.before(f"b{number}")[begun:]
            # What has the places, and the one whose turn is before.
            assert len(between) <= checker_module._NUM_LANES + 1, order.begun
        await asyncio.gather(*slow)


async def test_nor_those_of_the_same_call_but_for_the_first_time_that_each_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _ordered(monkeypatch) as (checker, order):
        slow = _ask(checker, *(f"slow {n}" for n in range(20)))
        await asyncio.sleep(0)
        assert await checker.check(_regex("b")) == ""
        assert order.before("b").count("slow 19") == 1
        assert sum(task.done() for task in slow) < 20
        for number in range(10):
            begun = len(order.begun)
            assert await checker.check(_regex(f"b{number}")) == ""
            assert len(order.before(f"b{number}")[begun:]) <= 1, order.begun
        await asyncio.gather(*slow)


async def test_who_has_one_slow_constraint_does_not_wait_for_all_of_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _ordered(monkeypatch) as (checker, order):
        many = _ask(checker, *(f"slow {n}" for n in range(16)), caller="many")
        # All of them have had their first time, and wait for more of it.
        while "slow 15" not in order.begun:
            await asyncio.sleep(0)
        begun = len(order.begun)
        assert await checker.check(_regex("slow too"), "one") == ""
        between = [each for each in order.before("all of slow too")[begun:] if "all of" in each]
        assert len(between) <= 2, order.begun
        await asyncio.gather(*many)


async def test_who_asks_for_the_same_as_another_waits_its_own_turn_and_not_that_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _ordered(monkeypatch) as (checker, order):
        many = _ask(checker, *(f"slow {n}" for n in range(100)), caller="many")
        while not order.begun:
            await asyncio.sleep(0)
        assert await checker.check(_regex("slow 99"), "one") == ""
        assert len([each for each in order.before("all of slow 99") if "all of" in each]) <= 3
        assert len(order.before("slow 99")) <= 5
        assert order.begun.count("slow 99") == 1
        await asyncio.gather(*many)


async def test_who_began_may_leave_and_the_check_goes_on_in_the_turns_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _ordered(monkeypatch) as (checker, order):
        many = _ask(checker, *(f"slow {n}" for n in range(100)), caller="many")
        await asyncio.sleep(0)
        [joined] = _ask(checker, "slow 99", caller="one")
        await asyncio.sleep(0)
        many.pop().cancel()
        assert await joined == ""
        assert len(order.before("slow 99")) <= 4
        await asyncio.gather(*many)


async def test_who_joins_counts_against_its_own_bound_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checker_module, "_MAX_PENDING", 32)
    async with _ordered(monkeypatch) as (checker, _):
        many = _ask(checker, *(f"m{n}" for n in range(16)), caller="many")
        own = _ask(checker, *(f"o{n}" for n in range(4)), caller="one")
        await asyncio.sleep(0)
        # It waits for as many as it may: for no other's either.
        with pytest.raises(NotChecked, match="19 constraints wait to be checked, 16 of them of"):
            await checker.check(_regex("o0"), "many")
        # Others may wait for what that one waits for.
        joined = _ask(checker, *(f"m{n}" for n in range(5)), caller="one")
        assert set(await asyncio.gather(*many, *own, *joined)) == {""}


async def test_nothing_is_checked_for_longer_when_all_who_waited_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _ordered(monkeypatch) as (checker, order):
        [waiting] = _ask(checker, "slow")
        while not order.begun:
            await asyncio.sleep(0)
        waiting.cancel()
        while checker._pending:
            await asyncio.sleep(0)
        assert await checker.check(_regex("b")) == ""
        assert order.begun == ["slow", "b"]


async def test_checks_at_once_are_bounded_and_so_is_the_memory_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _slow_checker(monkeypatch) as checker:
        [process] = _processes()
        lanes = _lanes(process)
        tasks = [asyncio.create_task(checker.check(_slow(n), n)) for n in range(3)]
        most, limits, own_bytes = 0, set(), 0
        while not all(task.done() for task in tasks):
            forks = _forks(lanes)
            most = max(most, len(forks))
            own_bytes = max(own_bytes, *(lane.memory_info().vms for lane in lanes))
            for fork in forks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    limits.add(fork.rlimit(psutil.RLIMIT_AS)[0])
            await asyncio.sleep(0.02)
        # On a busy machine two may never be seen at the same moment.
        assert 1 <= most <= checker_module._NUM_LANES
        memory_bytes = ShardConfig().constraint_memory_bytes
        # Each is seen before it is bounded, too.
        assert any(memory_bytes < bound <= own_bytes + memory_bytes for bound in limits)
        assert all(bound <= own_bytes + memory_bytes for bound in limits)


async def test_one_that_needs_more_than_the_first_time_gets_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checker_module, "_FIRST_S", 0.005)
    async with _checker() as checker:
        assert await _patient_check(checker, LARGE) == ""
        assert checker.known(LARGE) == ""


async def test_one_that_takes_too_much_memory_is_refused() -> None:
    async with _checker(constraint_memory_bytes=8 << 20) as checker:
        reason = "regex: needs more than 8388608 bytes (--constraint-memory-bytes)"
        assert await checker.check(LARGE) == reason
        [process] = _processes()
        assert await checker.check(_regex("a")) == ""
        assert _processes() == [process]


@pytest.mark.parametrize("count", [1000, 5000])
async def test_one_that_overflows_a_small_stack_costs_no_process_and_is_logged(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The check refuses it even if this process's stack is large enough, because a thread's stack
    may be smaller.
    """
    async with _checker() as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        with caplog.at_level(logging.WARNING):
            assert await checker.check(_doubling(count)) == "grammar: cannot be compiled"
        assert "Segmentation fault" in caplog.text
        assert await checker.check(_doubling(100)) == ""
        assert _processes() == [process]


async def test_one_that_gets_no_time_on_the_processor_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It gets all of its time at once.
    monkeypatch.setattr(checker_module, "_FIRST_S", 0.5)
    async with _checker(constraint_timeout_s=0.5) as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        lanes = _lanes(process)
        waiting = asyncio.create_task(checker.check(_slow(0)))
        fork = await _next_fork(lanes)
        fork.suspend()
        await asyncio.sleep(patience_s(0.5) + 0.1)
        fork.resume()
        with pytest.raises(NotChecked, match="take too long to check just now"):
            await waiting
        assert not is_alive(fork)
        assert checker.known(_slow(0)) is None
        assert await checker.check(_regex("b")) == ""
        assert _processes() == [process]


async def _next_fork(lanes: list[psutil.Process]) -> psutil.Process:
    """A fork that has set its limits."""
    async with asyncio.timeout(30):
        while True:
            for fork in _forks(lanes):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if fork.rlimit(psutil.RLIMIT_AS)[0] != psutil.RLIM_INFINITY:
                        return fork
            await asyncio.sleep(0)


async def test_a_process_that_is_killed_is_replaced_and_its_check_may_be_tried_again() -> None:
    async with _checker() as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        process.suspend()
        waiting = [asyncio.create_task(checker.check(_regex(f"b{n}"))) for n in range(9)]
        await asyncio.sleep(0.05)
        process.kill()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        lost = [n for n, result in enumerate(results) if isinstance(result, NotChecked)]
        # What waited in the lane, and of the others at most what the other lane was at.
        assert 1 <= len(lost) <= checker_module._NUM_LANES
        assert checker.known(_regex(f"b{lost[0]}")) is None
        assert await checker.check(_regex(f"b{lost[0]}")) == ""
        assert _processes() != [process]


@pytest.mark.parametrize("lane", range(checker_module._NUM_LANES))
async def test_one_of_which_a_part_is_killed_while_idle_is_replaced_before_the_next_check(
    lane: int,
) -> None:
    async with _checker() as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        _lanes(process)[lane].kill()
        await asyncio.sleep(0.2)
        for number in range(4):
            assert await checker.check(_regex(f"b{number}")) == ""
        assert _processes() != [process]
        assert not is_alive(process)


@pytest.mark.parametrize("which", ["the process", "a fork"])
async def test_one_that_hangs_is_killed(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "_GRACE_S", 0.0)
    monkeypatch.setattr(checker_module, "_FIRST_S", 0.5)
    async with _checker(constraint_timeout_s=0.5) as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        lanes = _lanes(process)
        if which == "the process":
            process.suspend()
            waiting = [asyncio.create_task(checker.check(_regex(f"b{n}"))) for n in range(2)]
        else:
            waiting = [asyncio.create_task(checker.check(_slow(0)))]
            lanes.append(await _next_fork(lanes))
            lanes[-1].suspend()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert any(isinstance(result, NotChecked) for result in results)
        wait_until(lambda: not any(map(is_alive, lanes)), timeout_s=30, what="all have ended")
        assert await checker.check(_regex("c")) == ""


async def test_one_that_makes_no_sense_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _checker() as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        with monkeypatch.context() as patched:
            patched.setattr(checker_module, "_ANSWERS", msgspec.msgpack.Decoder(int))
            with pytest.raises(CheckFailed):
                await asyncio.wait_for(checker.check(_regex("b")), 60)
        assert not is_alive(process)
        assert await checker.check(_regex("b")) == ""


async def test_who_leaves_during_a_check_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "_FIRST_S", 1.0)
    async with _checker() as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        lanes = _lanes(process)
        waiting = asyncio.create_task(checker.check(_slow(0)))
        await _next_fork(lanes)
        waiting.cancel()
        async with asyncio.timeout(30):
            while checker.known(_slow(0)) is None:
                await asyncio.sleep(0.01)
        assert checker.known(_slow(0)) == ""
        assert _processes() == [process]


async def test_one_whose_check_fails_ends_at_once_and_others_are_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with _checker() as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        answer_to = _CheckProcess.answer_to

        async def fail_on_b(one: _CheckProcess, check: Check, lane: int) -> Answer:
            if check.constraint == _regex("b"):
                raise ZeroDivisionError("as nobody foresaw")
            return await answer_to(one, check, lane)

        monkeypatch.setattr(_CheckProcess, "answer_to", fail_on_b)
        failed, checked = await asyncio.wait_for(
            asyncio.gather(
                checker.check(_regex("b")), checker.check(_regex("c")), return_exceptions=True
            ),
            60,
        )
        assert isinstance(failed, CheckFailed)
        assert checked == ""
        assert _processes() == [process]
        assert "as nobody foresaw" in caplog.text


async def test_where_no_process_can_be_made_as_nobody_foresaw_the_check_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    async with _checker() as checker:
        checking = [asyncio.create_task(checker.check(_regex(name))) for name in "ab"]
        results = await asyncio.wait_for(asyncio.gather(*checking, return_exceptions=True), 5)
        assert [type(result) for result in results] == [CheckFailed, CheckFailed]


async def test_another_tokenizer_makes_another_process_and_the_same_one_does_not() -> None:
    async with _checker() as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        checker.use(TOKENIZER.read_bytes(), VOCAB_SIZE, (0,))
        await checker.check(_regex("b"))
        assert _processes() == [process]
        checker.use(TOKENIZER.read_bytes(), VOCAB_SIZE, (1,))
        assert checker.known(_regex("a")) is None
        await checker.check(_regex("a"))
        [other] = _processes()
        assert other != process


async def test_a_verdict_for_the_tokenizer_before_is_not_kept() -> None:
    async with _checker() as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        lanes = _lanes(process)
        words = _slow(0)
        waiting = asyncio.create_task(checker.check(words))
        await _next_fork(lanes)
        checker.use(TOKENIZER.read_bytes(), VOCAB_SIZE, (1,))
        # Who asked for the one before may have it or not.
        with contextlib.suppress(NotChecked):
            assert await waiting == ""
        assert checker.known(words) is None
        assert await checker.check(words) == ""
        assert checker.known(words) == ""


async def test_a_tokenizer_that_cannot_be_read_refuses_without_a_verdict() -> None:
    async with _checker() as checker:
        checker.use(b"{}", VOCAB_SIZE, (0,))
        with pytest.raises(NotChecked):
            await checker.check(_regex("a"))


@pytest.mark.parametrize("busy", [False, True])
def test_the_process_ends_itself_when_its_server_is_gone(busy: bool) -> None:
    program = f"""
import asyncio
from pathlib import Path
import psutil
from penstock_shard.structured_output.checker import ConstraintChecker
from penstock_shard.config import ConstraintLimits
from penstock_proto.types import Constraint

async def main():
    checker = ConstraintChecker(ConstraintLimits(timeout_s=600.0, memory_bytes=2**28))
    checker.use(Path({str(TOKENIZER)!r}).read_bytes(), {VOCAB_SIZE}, (0,))
    await checker.check(Constraint("regex", "a"))
    [process] = psutil.Process().children()
    print(process.pid, flush=True)
    for number in range(10**6 if {busy} else 0):
        await checker.check(Constraint("regex", "|".join(f"{{n}}x{{number}}" for n in range(9999))))
    await asyncio.sleep(600)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        process = psutil.Process(int(server.stdout.readline()))
        if busy:
            wait_until(
                lambda: len(process.children(recursive=True)) >= checker_module._NUM_LANES,
                timeout_s=30,
                what="a check",
            )
        everyone = [process, *process.children(recursive=True)]
        server.kill()
        wait_until(lambda: not any(map(is_alive, everyone)), timeout_s=30, what="all have ended")


async def test_handing_over_a_large_tokenizer_does_not_hold_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest_s = 0.0
    run = asyncio.events.Handle._run

    def timed_run(handle: asyncio.Handle) -> None:
        nonlocal longest_s
        started_s = time.thread_time()
        run(handle)
        longest_s = max(longest_s, time.thread_time() - started_s)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed_run)
    async with _checker() as checker:
        # Unusable, which is noticed when all of it is there. To copy it takes longer.
        checker.use(bytes(32 << 20), VOCAB_SIZE, (0,))
        with pytest.raises(NotChecked):
            await checker.check(_regex("a"))
    assert longest_s < 0.02


async def test_a_terminals_signals_do_not_reach_the_process() -> None:
    async with _checker() as checker:
        await checker.check(_regex("a"))
        [process] = _processes()
        assert os.getsid(process.pid) != os.getsid(0)


def test_the_process_imports_neither_torch_nor_grpc() -> None:
    program = (
        "import sys, penstock_shard.structured_output.check_process\n"
        "print(*{'torch', 'grpc', 'google.protobuf', 'asyncio'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == ""
