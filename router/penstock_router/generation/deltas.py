"""Gains of an answer, as they come: taken to whoever uses them, bundled, bounded, or collected."""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Self

from penstock_router.errors import BadRequest
from penstock_router.generation.best_of import pick_best
from penstock_router.generation.choice import LOGPROB_BYTES, Delta, DeltaBuffer
from penstock_router.generation.job import Job
from penstock_router.request import Options

# Counts bytes as held in memory, or raises.
Hold = Callable[[int], None]
# Something to wait for.
Wait = Callable[[], Awaitable[object]]
# Uses a delta; returns what to wait for before the next one is taken, or None.
Use = Callable[[Delta], Wait | None]
# How many deltas are taken before the event loop gets a turn: those of many choices may be ready,
# and an event of one takes some 30 us.
_DELTAS_A_TURN = 16
_LET_OTHERS_RUN: Wait = functools.partial(asyncio.sleep, 0)


def ignore_output() -> None:
    """A listener that does nothing."""


class Deltas(ABC):
    """A source of deltas for one reader, which as a rule calls `for_each`.

    A reader that is done listening calls `listen(ignore_output)`: otherwise reader and source form
    a reference cycle. Iterating wakes a task for each delta; it is for whoever must know of the
    first one before going on, as its error has a status of its own while no header is sent.
    """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Everything is taken, and no more will come."""

    @abstractmethod
    def take(self) -> Delta | None:
        """The next delta; None if there is none yet. Raises the error that ended the source."""

    @abstractmethod
    def listen(self, on_output: Callable[[], None]) -> None:
        """Have `on_output` called when there may be a delta, or the end; it must not raise."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while (delta := self.take()) is None:
            if self.ended:
                raise StopAsyncIteration
            news = asyncio.Event()
            self.listen(news.set)
            await news.wait()
        return delta


class DeltasWrapper(Deltas):
    """Another source's deltas, changed."""

    def __init__(self, source: Deltas) -> None:
        self._source = source

    @property
    def ended(self) -> bool:
        return self._source.ended

    def listen(self, on_output: Callable[[], None]) -> None:
        self._source.listen(on_output)


# ---- Fewer and larger ones ---------------------------------------------------------------------


def bundle(deltas: Deltas, interval: int) -> Deltas:
    """Deltas of at least `interval` tokens; each choice's first one comes at once, and its last one
    has whatever is left."""
    return deltas if interval == 1 else _DeltaBundler(deltas, interval)


class _DeltaBundler(DeltasWrapper):
    def __init__(self, source: Deltas, interval: int) -> None:
        super().__init__(source)
        self._interval = interval
        # For each choice that has begun: what is held back.
        self._held: dict[int, DeltaBuffer | None] = {}
        # What ended the source; it is raised once nothing is held back.
        self._error: Exception | None = None

    def take(self) -> Delta | None:
        if self._error is None:
            try:
                return self._take()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised below
                self._error = error
        for index, held in self._held.items():
            if held is not None:
                self._held[index] = None
                return held.whole()
        failure, self._error = self._error, None
        try:
            raise failure
        finally:
            # Break a reference cycle: the error's traceback refers to this frame.
            del failure

    def _take(self) -> Delta | None:
        while (delta := self._source.take()) is not None:
            begins = delta.index not in self._held
            held = self._held.get(delta.index)
            if held is None:
                held = DeltaBuffer(delta)
            else:
                held.add(delta)
            is_enough = held.num_tokens >= self._interval
            if begins or is_enough or delta.finish_reason is not None:
                self._held[delta.index] = None
                return held.whole()
            self._held[delta.index] = held
        return None


# ---- All of them -------------------------------------------------------------------------------


async def for_each(deltas: Deltas, use: Use) -> None:
    """Call `use` with each delta, to the end: in the very call that brings it, so that no task is
    woken. If `use` returns something to wait for, that is awaited before the next delta is taken;
    deltas gather where they arrive meanwhile. Raises what the source or `use` raises.
    """
    await _DeltaPump(deltas, use).run()


class _DeltaPump:
    """See `for_each`. The task that runs `run` does the waiting, and all else happens in
    `_on_output`, wherever that is called.
    """

    def __init__(self, deltas: Deltas, use: Use) -> None:
        self._deltas = deltas
        self._use = use
        # Done while the task is at work.
        self._needed: asyncio.Future[None]
        self._wait: Wait | None = None
        self._error: Exception | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._deltas.listen(self._on_output)
        try:
            while True:
                self._needed = loop.create_future()
                self._on_output()
                await self._needed
                if self._error is not None:
                    raise self._error
                if self._wait is None:
                    return
                wait, self._wait = self._wait, None
                await wait()
        finally:
            # Break reference cycles: the source, and the error's traceback, refer to this object.
            self._deltas.listen(ignore_output)
            self._error = None

    def _on_output(self) -> None:
        """Take what can be taken at once, until the task has to wait for something, or to end."""
        if self._needed.done():
            return
        try:
            for _ in range(_DELTAS_A_TURN):
                delta = self._deltas.take()
                if delta is None:
                    if not self._deltas.ended:
                        return
                    break
                self._wait = self._use(delta)
                if self._wait is not None:
                    break
            else:
                self._wait = _LET_OTHERS_RUN
        except Exception as error:  # noqa: BLE001 - whatever it is, the task raises it
            self._error = error
        self._needed.set_result(None)


def bound(deltas: Deltas, options: Options, max_bytes: int, hold: Hold) -> Deltas:
    """Pass on the same deltas, for a reader that keeps them all. `hold` is called with the bytes
    that the log-probabilities of each take.

    Raises `BadRequest` once they take more than `max_bytes`, and what `hold` raises.
    """
    return deltas if options.logprobs is None else _DeltaLimit(deltas, options, max_bytes, hold)


class _DeltaLimit(DeltasWrapper):
    def __init__(self, source: Deltas, options: Options, max_bytes: int, hold: Hold) -> None:
        super().__init__(source)
        self._hold = hold
        columns = 1 + (options.best_logprobs or 0) + len(options.logprob_token_ids)
        self._token_bytes = LOGPROB_BYTES * columns
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def take(self) -> Delta | None:
        delta = self._source.take()
        if delta is not None:
            num_bytes = self._token_bytes * len(delta.token_ids)
            self._num_bytes += num_bytes
            if self._num_bytes > self._max_bytes:
                raise BadRequest(
                    f"logprobs: those of this answer are more than {self._max_bytes} bytes by now; "
                    "stream it, or ask for fewer of them or of tokens",
                    param="logprobs",
                )
            self._hold(num_bytes)
        return delta


async def collect(deltas: Deltas, job: Job, max_bytes: int, hold: Hold) -> list[Delta]:
    """Collect all deltas of a job: one for each choice of the answer, in the answer's order.

    Raises what `bound` raises.
    """
    gathered: dict[int, DeltaBuffer] = {}

    def add(delta: Delta) -> None:
        if delta.index in gathered:
            gathered[delta.index].add(delta)
        else:
            gathered[delta.index] = DeltaBuffer(delta)

    await for_each(bound(deltas, job.options, max_bytes, hold), add)
    return pick_best(job, [gathered[index].whole() for index in sorted(gathered)])
