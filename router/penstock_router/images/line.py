"""Runs work on images in a few places, and bounds the number of waiting jobs and their wait.

Equal jobs run once for all waiting clients, in the turn of the first client. A refusal reaches only
the client that causes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from penstock_router.admission.shared_budget import Holding, SharedBudget
from penstock_router.admission.turns import Turns
from penstock_router.errors import TooManyRequests

_Result = TypeVar("_Result")

_MAX_WAITING = 256
_MAX_WAIT_S = 30.0


@dataclass(eq=False, slots=True)
class _Waiter:
    """A client that waits for a job, perhaps more than once, but takes only one place in the
    line.
    """

    holding: Holding
    num_waiting: int = 0


@dataclass(eq=False, slots=True)
class _Job(Generic[_Result]):
    work: Callable[[str], Awaitable[_Result]]
    task: asyncio.Task[_Result] = field(init=False)
    clients: dict[str, _Waiter] = field(default_factory=dict)
    # The client in whose turn the job runs.
    client: str | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)


class Line:
    """Jobs by name, and the places that they wait for. A client may wait for at most as many jobs
    as the queue still has room for.
    """

    def __init__(self, places: int, what_for: str) -> None:
        """Make a line; `what_for` ends the sentence "too many images wait to be ..."."""
        self._what_for = what_for
        self._turns = Turns(places)
        self._waiting = SharedBudget(_MAX_WAITING)
        self._jobs: dict[Hashable, _Job[Any]] = {}

    def has(self, name: Hashable) -> bool:
        return name in self._jobs

    async def do(
        self, name: Hashable, work: Callable[[str], Awaitable[_Result]], client: str
    ) -> _Result:
        """Return or raise what `work(client)` does, called in the turn of one client that waits for
        this job. The job is cancelled when no client waits any more.

        Raises `TooManyRequests` if too many jobs wait, or after waiting too long.
        """
        while True:
            job: _Job[_Result] = self._jobs.get(name) or self._begin(name, work)
            try:
                return await self._outcome(name, job, client)
            except TooManyRequests:
                if job.client in (None, client):
                    raise
                # The job was refused in another client's turn. Try again in this client's own turn.
                self._end(name, job)
            finally:
                # Break a cycle: an error refers to this frame, and the job's task to the error.
                del job

    async def close(self) -> None:
        tasks = [job.task for job in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, name: Hashable, work: Callable[[str], Awaitable[_Result]]) -> _Job[_Result]:
        job = self._jobs[name] = _Job(work)
        job.task = asyncio.create_task(self._run(job))
        job.task.add_done_callback(lambda _: self._end(name, job))
        return job

    async def _run(self, job: _Job[_Result]) -> _Result:
        place = await self._turns.take(job.clients)
        try:
            job.client = place.client
            self._leave_line(job)
            return await job.work(place.client)
        finally:
            self._turns.give_back(place)
            # Break the same cycle.
            del job

    def _end(self, name: Hashable, job: _Job[Any]) -> None:
        # Another job of this name may have begun.
        if self._jobs.get(name) is job:
            del self._jobs[name]
        self._leave_line(job)
        if job.task.done() and not job.task.cancelled():
            # Retrieve the exception, because no client may wait any more.
            job.task.exception()

    def _leave_line(self, job: _Job[Any]) -> None:
        job.begun.set()
        for waiter in job.clients.values():
            waiter.holding.close()

    async def _outcome(self, name: Hashable, job: _Job[_Result], client: str) -> _Result:
        try:
            with self._waits(job, client) as waiter:
                await self._has_begun(job, waiter)
                return await asyncio.shield(job.task)
        finally:
            if not job.clients:
                job.task.cancel()
                self._end(name, job)
            del job

    @contextmanager
    def _waits(self, job: _Job[Any], client: str) -> Iterator[_Waiter]:
        """Count one more wait of this client for the job, within the scope."""
        waiter = job.clients.setdefault(client, _Waiter(self._waiting.hold(client)))
        waiter.num_waiting += 1
        try:
            yield waiter
        finally:
            waiter.num_waiting -= 1
            if not waiter.num_waiting:
                waiter.holding.close()
                del job.clients[client]

    async def _has_begun(self, job: _Job[Any], waiter: _Waiter) -> None:
        # If a place is free, the job gets it now.
        await asyncio.sleep(0)
        if job.begun.is_set():
            return
        if not waiter.holding.amount:
            waiter.holding.grow(1, lambda *_: self._refusal())
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await job.begun.wait()
        except TimeoutError:
            raise self._refusal() from None

    def _refusal(self) -> TooManyRequests:
        return TooManyRequests(f"too many images wait to be {self._what_for}; try again shortly")
