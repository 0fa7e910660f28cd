"""Runs work that is too long for the event loop and releases the GIL, in a few threads.

The queue of clients' work is bounded: more work is refused immediately. One client occupies at most
as many places as there are threads. Its other work waits, behind other clients' work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import TypeVar
from weakref import WeakValueDictionary

from penstock_router.errors import TooManyRequests

_Result = TypeVar("_Result")


class Threads:
    def __init__(self, executor: Executor, max_pending: int, num_threads: int = 1) -> None:
        """Use the caller's `executor`, which has `num_threads`. At most `max_pending` pieces of
        work may run or wait.
        """
        self._executor = executor
        self._num_threads = num_threads
        self._max_pending = max_pending
        self._num_pending = 0
        # The semaphore of each client whose work runs or waits.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, work: Callable[[], _Result], client: str = "") -> _Result:
        """Return or raise what `work` does; raise `TooManyRequests` if too much work waits.
        `client` owns the work; "" stands for the router.
        """
        if self._num_pending >= self._max_pending:
            raise TooManyRequests(
                f"{self._max_pending} pieces of work wait for the router's threads; "
                "try again shortly"
            )
        turn = self._turns.setdefault(client, asyncio.Semaphore(self._num_threads))
        with ExitStack() as scope:
            self._num_pending += 1
            scope.callback(self._forget_one)
            await turn.acquire()
            scope.callback(turn.release)
            done = asyncio.wrap_future(self._executor.submit(work))
            # Release the client's turn when the work is done, even if its caller was cancelled.
            kept = scope.pop_all()
            done.add_done_callback(lambda _: kept.close())
        try:
            return await asyncio.shield(done)
        finally:
            # Break the reference cycle of frame, future and error.
            del done

    def _forget_one(self) -> None:
        self._num_pending -= 1

    async def run_for_all(self, work: Callable[[], _Result]) -> _Result:
        """Run work that several clients may wait for, and that is therefore never refused."""
        return await asyncio.wrap_future(self._executor.submit(work))
