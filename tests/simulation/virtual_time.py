"""An event loop whose time passes only while everybody waits, and processes that can be stopped.

What runs on it takes as long as it computes, whatever it sleeps; and the same, each time it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, cast

_Result = TypeVar("_Result")
# What a turn of the loop takes: no clock stands still, and what is due in less than this is due.
_TURN_S = 1e-9
# Nobody who waits at all needs as many turns in a millisecond.
_MOST_TURNS = 100_000

# Which process a callback belongs to: tasks and timers have that of the task that made them.
_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Stuck(Exception):
    """Everybody waits, and nothing will ever happen again."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Has no file descriptors: what runs on it must open none."""

    def __init__(self, ends_s: float = 3600.0) -> None:
        """Raise `Stuck` out of whatever runs, once the loop's time is `ends_s`."""
        super().__init__()
        self._ends_s = ends_s
        self._now_s = 0.0
        # The turns since `_counts_from_s`, at most a millisecond of virtual time ago.
        self._turns, self._counts_from_s = 0, 0.0
        # asyncio asks the selector for events, with the time to wait for them.
        self._selector = self
        self.processes: list[Process] = []

    def time(self) -> float:
        return self._now_s

    def select(self, timeout_s: float | None) -> list[object]:
        """Move the time on to the next timer. Return no events: nothing happens outside."""
        if timeout_s is None:
            raise Stuck(f"at {self._now_s:.3f} s nobody has anything to do")
        self._now_s += max(timeout_s, _TURN_S)
        self._turns += 1
        if self._now_s > self._counts_from_s + 0.001:
            self._counts_from_s, self._turns = self._now_s, 0
        if self._turns > _MOST_TURNS:
            raise Stuck(f"at {self._now_s:.3f} s somebody turns in circles")
        if self._now_s > self._ends_s:
            raise Stuck(f"at {self._now_s:.3f} s it is not over")
        return []

    def _process_events(self, event_list: object) -> None:
        return

    def _write_to_self(self) -> None:
        return

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., _Result], *args: Any
    ) -> asyncio.Future[_Result]:
        """Run the function at once: threads would take turns as the machine likes."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the result
            done.set_exception(error)
        return done

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is None or process.hold(handle):
            cast(Any, self)._ready.append(handle)
        return handle


class Process:
    """A simulated process, which can be stopped, resumed and killed, as by SIGSTOP, SIGCONT and
    SIGKILL.
    """

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.loop = loop
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self.is_stopped = False
        self.is_dead = False
        # The callbacks that are due and the timers of a stopped process.
        self._due: list[asyncio.Handle] = []
        self._timers: list[Any] = []
        loop.processes.append(self)

    def run(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Run a coroutine as a task of this process."""
        return self.loop.create_task(work, context=self.context.copy())

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.loop.call_soon(callback, *args, context=self.context.copy())

    def hold(self, handle: asyncio.Handle) -> bool:
        """True if a callback may run. While the process is stopped or dead, keep the callback and
        return False.
        """
        if self.is_stopped or self.is_dead:
            self._due.append(handle)
            return False
        return True

    def stop(self) -> None:
        """Stop the process: nothing of it runs until `resume`."""
        if not self.is_stopped and not self.is_dead:
            self.is_stopped = True
            self._take_out()

    def resume(self) -> None:
        """Let the process go on. Callbacks that came due meanwhile run now."""
        if self.is_stopped and not self.is_dead:
            self._go_on()

    def _go_on(self) -> None:
        self.is_stopped = self.is_dead = False
        loop: Any = self.loop
        due, self._due = self._due, []
        loop._ready.extend(due)
        for timer in self._timers:
            heapq.heappush(loop._scheduled, timer)
        self._timers.clear()

    def kill(self) -> None:
        """Kill the process: nothing of it runs any more, not even clean-up."""
        if not self.is_dead:
            self._take_out()
            self.is_dead = True

    def let_end(self) -> None:
        """Let a stopped or killed process go on after all is over, so that its tasks can end."""
        if self.is_stopped or self.is_dead:
            self._go_on()

    def _take_out(self) -> None:
        loop: Any = self.loop
        # The loop has counted the ready handles already, so their number must stay.
        for index, handle in enumerate(loop._ready):
            if handle._context.get(_PROCESS) is self and not handle._cancelled:
                self._due.append(handle)
                loop._ready[index] = _nothing(loop)
        mine = [timer for timer in loop._scheduled if timer._context.get(_PROCESS) is self]
        if mine:
            self._timers += mine
            loop._scheduled[:] = [timer for timer in loop._scheduled if timer not in mine]
            heapq.heapify(loop._scheduled)


def _nothing(loop: asyncio.AbstractEventLoop) -> asyncio.Handle:
    return asyncio.Handle(_do_nothing, (), loop)


def _do_nothing() -> None:
    return


class InlineExecutor(Executor):
    """Runs what it is given at once, in the thread that gives it."""

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as executors do
            future.set_exception(error)
        return future


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, _Result]], *, ends_s: float) -> _Result:
    """The result of `main` on a loop of its own. Raises `Stuck`, and what `main` raises."""
    loop = VirtualLoop(ends_s)
    try:
        return loop.run_until_complete(main(loop))
    finally:
        _end_all_tasks(loop)
        loop.close()


def _end_all_tasks(loop: VirtualLoop) -> None:
    """End all tasks, without asyncio's warnings about tasks that nobody awaits."""
    loop.set_exception_handler(lambda loop, context: None)
    for process in loop.processes:
        process.let_end()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        with contextlib.suppress(Stuck):
            loop.run_until_complete(asyncio.wait(tasks, timeout=60.0))
