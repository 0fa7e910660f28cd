"""A few threads for work that is too long for the event loop and releases the interpreter lock.

The queue of clients' work is bounded: what is beyond it is refused at once. Of each client's, no
more than there are threads is under way: however much of it waits, others' is next.
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
    """Runs functions in an executor, which belongs to the caller."""

    def __init__(self, executor: Executor, max_pending: int, num_threads: int = 1) -> None:
        """`max_pending` bounds what runs and waits, together; the executor has `num_threads`."""
        self._executor = executor
        self._num_threads = num_threads
        self._max_pending = max_pending
        self._num_pending = 0
        # By client, while its work runs or waits.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, work: Callable[[], _Result], client: str = "") -> _Result:
        """Returns or raises what `work` does; raises `TooManyRequests` if too much waits. `client`
        is whose work it is; "": the router's own.
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
            # When the work is done, even if its caller was cancelled.
            kept = scope.pop_all()
            done.add_done_callback(lambda _: kept.close())
        try:
            return await asyncio.shield(done)
        finally:
            # An error refers to this frame, and its future to the error.
            del done

    def _forget_one(self) -> None:
        self._num_pending -= 1

    async def run_for_all(self, work: Callable[[], _Result]) -> _Result:
        """Run what several may wait for: it is never refused, as that would be to all of them for
        what one has sent.
        """
        return await asyncio.wrap_future(self._executor.submit(work))
