"""How many sequences may be in flight, for how long, and whether the router takes requests at all.

Knows numbers and times only. A request asks for all its places at once and gives them back on
every way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from penstock_router.errors import BadRequest, TimedOut, TooManyRequests, Unavailable

_STOPPING = "the router is shutting down"


class TimeLimit:
    """Until when a request may run: its own limit, or the end of the router's."""

    def __init__(self, timeout_s: float | None) -> None:
        now = asyncio.get_running_loop().time()
        self._at = None if timeout_s is None else now + timeout_s
        self._timer: asyncio.Timeout | None = None
        self._stopping = False

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[None]:
        """Runs its body up to the limit; raises `TimedOut` or `Unavailable` there."""
        timer = self._timer = asyncio.timeout_at(self._at)
        try:
            async with timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            if self._stopping:
                raise Unavailable(_STOPPING) from None
            raise TimedOut("the request took longer than this server allows") from None
        finally:
            self._timer = None

    def end(self) -> None:
        """The router's time is up."""
        self._at, self._stopping = asyncio.get_running_loop().time(), True
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(self._at)


class Admission:
    """Bounded places; over the bound the answer is 429, not a queue that only adds waiting."""

    def __init__(
        self, limit: int, *, workers: int = 1, request_timeout_s: float | None = None
    ) -> None:
        self._limit = limit
        self._whose = "this server" if workers == 1 else f"each of this server's {workers} workers"
        self._request_timeout_s = request_timeout_s
        self._running: set[TimeLimit] = set()
        self._idle = asyncio.Event()
        self.in_flight = 0
        self.stopping = False

    @contextmanager
    def places(self, count: int, param: str = "n") -> Iterator[TimeLimit]:
        """Hold `count` places, or raise; `param` is the field that asks for so many."""
        if self.stopping:
            raise Unavailable(_STOPPING)
        if count > self._limit:
            text = f"{param}: the request asks for {count} sequences; {self._whose} runs"
            raise BadRequest(f"{text} {self._limit} at most", param=param)
        if self.in_flight + count > self._limit:
            text = f"{self._whose} runs {self._limit} sequences at most, and {self.in_flight} are"
            raise TooManyRequests(f"{text} in flight; try again shortly")
        limit = TimeLimit(self._request_timeout_s)
        self._running.add(limit)
        self.in_flight += count
        try:
            yield limit
        finally:
            self._running.remove(limit)
            self.in_flight -= count
            if not self._running:
                self._idle.set()

    async def stop(self, timeout_s: float) -> None:
        """Admit nothing more; wait for what is in flight, and end what is left after that."""
        self.stopping = True
        if not self._running:
            return
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for limit in self._running:
                limit.end()
