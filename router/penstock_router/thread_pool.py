"""A few threads for work that is too long for the event loop and releases the interpreter lock.

The queue of clients' work is bounded: what is beyond it is refused at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from penstock_router.errors import TooManyRequests

_Result = TypeVar("_Result")


class Threads:
    """Runs functions in an executor, which belongs to the caller."""

    def __init__(self, executor: Executor, max_pending: int) -> None:
        """`max_pending` bounds what runs and waits, together."""
        self._executor = executor
        self._max_pending = max_pending
        self._room = threading.BoundedSemaphore(max_pending)

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Returns or raises what `work` does; raises `TooManyRequests` if too much waits."""
        if not self._room.acquire(blocking=False):
            raise TooManyRequests(
                f"{self._max_pending} pieces of work wait for the router's threads; "
                "try again shortly"
            )
        try:
            future = self._executor.submit(work)
        except RuntimeError:
            # It was shut down.
            self._room.release()
            raise
        # When the work is done, even if its caller was cancelled.
        future.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(future)

    async def run_for_all(self, work: Callable[[], _Result]) -> _Result:
        """The same for what several may wait for: never refused, as that would be to all of them
        for what one has sent.
        """
        return await asyncio.wrap_future(self._executor.submit(work))
