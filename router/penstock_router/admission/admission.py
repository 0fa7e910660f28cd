"""Admits requests, queues them, and bounds how long each may run.

An admitted request is *queued*: it is being prepared, or waits for places. Once it has a place for
each of its sequences, it is *in flight* until it ends.

    with admission.enter(key, sequences) as ticket:      # 429 at once if the queue is full
        async with ticket.limit.scope():
            ...                                          # prepare
        await ticket.start(prompt_tokens)                # wait for places; 429 after a while
        ...                                              # generate, within `ticket.limit` too

Leaving the scope always gives everything back. Bounds hold for all keys together and, if set, for
each key; `fair_queue.py` decides which request is next. If the queue is full and another key has
more sequences here than the new request's key will have, that key's latest requests are refused to
make room, as in McKenney's Stochastic Fairness Queueing (1990).
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from penstock_router.admission.fair_queue import FairQueue, Share, Waiting
from penstock_router.admission.rate_limits import Charge, Rates
from penstock_router.config import RouterConfig
from penstock_router.errors import (
    TIME_IS_UP,
    ApiError,
    BadRequest,
    TimedOut,
    TooManyRequests,
    Unavailable,
)
from penstock_router.observe.metrics import Metrics

_STOPPING = "the router is shutting down"
_MAX_RETRY_AFTER_S = 60
# The time constant of `QueuePace`'s decaying average.
_PACE_S = 10.0


class TimeLimit:
    """The time when a request must end: at its own limit, or when `end` is called."""

    def __init__(self, timeout_s: float | None) -> None:
        now = asyncio.get_running_loop().time()
        # On the event loop's clock; None: no limit.
        self.at_s = None if timeout_s is None else now + timeout_s
        self._timer: asyncio.Timeout | None = None
        self._ended: ApiError | None = None

    def check(self) -> None:
        """Raise the error that was passed to `end`, if any."""
        if self._ended is not None:
            raise self._error()

    def scope(self) -> _Scope:
        """Run the scope's body until the limit. Then raise `TimedOut`, or the error passed to
        `end`.
        """
        return _Scope(self)

    def _error(self) -> ApiError:
        # Copy the error each time, or its frames and this object would form a reference cycle.
        return TimedOut(TIME_IS_UP) if self._ended is None else copy.copy(self._ended)

    def end(self, error: ApiError) -> None:
        self.at_s, self._ended = asyncio.get_running_loop().time(), error
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(self.at_s)


class _Scope:
    """The scope of `TimeLimit.scope`. A contextlib generator would do, but since Python 3.12 an
    error raised through one stays in memory until the garbage collector runs.
    """

    def __init__(self, limit: TimeLimit) -> None:
        self._limit = limit

    async def __aenter__(self) -> None:
        self._limit.check()
        self._timer = self._limit._timer = asyncio.timeout_at(self._limit.at_s)
        await self._timer.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_timeout = isinstance(error, TimeoutError)
        try:
            await self._timer.__aexit__(kind, error, traceback)
        except TimeoutError:
            is_timeout = True
        finally:
            self._limit._timer = None
            # Break the cycle: the error raised below refers to this frame.
            del error, traceback
        if is_timeout and self._timer.expired():
            raise self._limit._error() from None


class QueuePace:
    """The pace at which places become free: a decaying average since the worker was last idle."""

    def __init__(self, now_s: float) -> None:
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """Start measuring when the worker stops being idle."""
        # The number of places freed; older ones have less weight.
        self._weight = 0.0
        self._at_s = self._since_s = now_s

    def record_freed(self, places: int, now_s: float) -> None:
        self._weight = self._weight_at(now_s) + places
        self._at_s = now_s

    def seconds_until(self, places: int, now_s: float) -> float:
        age_s = max(1e-3, now_s - self._since_s)
        seen_s = _PACE_S * -math.expm1(-age_s / _PACE_S)
        # Add 1 for an estimate even before any place became free.
        return places * seen_s / (self._weight_at(now_s) + 1)

    def _weight_at(self, now_s: float) -> float:
        return self._weight * math.exp((self._at_s - now_s) / _PACE_S)


@dataclass(eq=False, slots=True)
class _Account(Share):
    """The sequences of a key or of all keys together, and the prompt tokens of those that wait for
    places.
    """

    key: str = ""
    # True if the key has bounds of its own.
    is_bounded: bool = False
    queued: int = 0
    queued_tokens: int = 0
    # Queued tickets, in order of arrival.
    tickets: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)

    @property
    def sequences(self) -> int:
        return self.in_flight + self.queued


_Amount = Literal["queued", "queued_tokens"]


class Ticket(Waiting):
    """An admitted request."""

    __slots__ = ("_admission", "account", "charge", "limit", "placed", "prompt_tokens", "state")

    def __init__(
        self,
        admission: Admission,
        account: _Account,
        sequences: int,
        limit: TimeLimit,
        charge: Charge,
    ) -> None:
        super().__init__(account, sequences)
        self.charge = charge
        self._admission = admission
        self.account = account
        self.limit = limit
        self.state: Literal["preparing", "waiting", "in flight", "gone"] = "preparing"
        # The prompt's tokens, while the ticket waits. `placed` is done when it gets its places.
        self.prompt_tokens = 0
        self.placed: asyncio.Future[None] | None = None

    @property
    def waits(self) -> bool:
        """True if the request is prepared but has no places yet."""
        return self.state == "waiting"

    def queued_amount(self, amount: _Amount) -> int:
        """Return how many of the queued sequences or tokens belong to this request."""
        return self.places if amount == "queued" else self.prompt_tokens

    async def start(self, prompt_tokens: int, max_output_tokens: int = 0) -> None:
        """Return when the request has all its places.

        Raises:
            TooManyRequests: the key's tokens are used up, the queue is full, or it waited too long.
            TimedOut: the request's own time limit passed first.
            Unavailable: the router stopped first.
        """
        self.charge.take_tokens(prompt_tokens, max_output_tokens)
        await self._admission.start(self, prompt_tokens)
        self.charge.begin(prompt_tokens)


def _latest(account: _Account, amount: _Amount, excess: int) -> list[Ticket]:
    """Return the account's latest queued requests that together hold at least `excess` sequences or
    tokens.
    """
    found: list[Ticket] = []
    for ticket in reversed(account.tickets):
        if excess <= 0:
            break
        if held := ticket.queued_amount(amount):
            found.append(ticket)
            excess -= held
    return found


class Admission:
    """The places of one worker, and the queue for them."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        workers = config.workers
        self._whose = "this server" if workers == 1 else f"each of this server's {workers} workers"
        self._limit = config.max_concurrent_requests
        self._key_limit = config.max_concurrent_requests_per_key
        self._all = _Account()
        self._accounts: dict[str, _Account] = {}
        self._queue = FairQueue()
        self._pace = QueuePace(time.monotonic())
        self._running: set[TimeLimit] = set()
        self._idle = asyncio.Event()
        self.stopping = False

    @property
    def in_flight(self) -> int:
        """The number of sequences that have places."""
        return self._all.in_flight

    @property
    def queued(self) -> int:
        """The number of sequences that are being prepared or wait for places."""
        return self._all.queued

    @property
    def queued_tokens(self) -> int:
        """The number of tokens in prompts that wait for places."""
        return self._all.queued_tokens

    @property
    def num_keys(self) -> int:
        return len(self._accounts)

    @contextmanager
    def enter(
        self,
        key: str,
        sequences: int,
        param: str = "n",
        *,
        timeout_s: float | None = None,
        waited_s: float = 0.0,
        max_concurrent: int | None = None,
        rates: Rates | None = None,
    ) -> Iterator[Ticket]:
        """Admit a request of this many sequences, or raise; `param` is the field that sets them.

        The time limit is the shorter of the server's and the request's `timeout_s`, counted from
        its arrival `waited_s` ago. `max_concurrent` replaces the common bound for this key. `rates`
        holds the key's limits per minute.
        """
        if self.stopping:
            raise Unavailable(_STOPPING)
        account = self._accounts.get(key) or _Account(key=key)
        self._bound(account, max_concurrent)
        self._check_width(account, sequences, param)
        self._check_room(account, sequences)
        limits_s = [s for s in (timeout_s, self._config.request_timeout_s) if s is not None]
        limit = TimeLimit(min(limits_s) - waited_s if limits_s else None)
        charge = Charge(rates, self._metrics)
        ticket = Ticket(self, account, sequences, limit, charge)
        if not self._accounts:
            self._pace.begin(time.monotonic())
        self._accounts[key] = account
        account.tickets[ticket] = None
        self._change(account, queued=sequences)
        self._running.add(limit)
        try:
            yield ticket
        finally:
            charge.settle()
            self._forget(ticket)
            self._give_places()
            self._running.remove(limit)
            if not self._running:
                self._idle.set()

    async def start(self, ticket: Ticket, prompt_tokens: int) -> None:
        ticket.limit.check()
        ticket.state = "waiting"
        self._queue.add(ticket)
        self._give_places()
        if ticket.waits:
            self._check_tokens(ticket, prompt_tokens)
        if ticket.waits:
            async with ticket.limit.scope():
                await self._wait(ticket)

    async def stop(self, timeout_s: float) -> None:
        """Admit no more requests. Wait until all have ended; after `timeout_s`, end the rest."""
        self.stopping = True
        if not self._running:
            return
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for limit in self._running:
                limit.end(Unavailable(_STOPPING))

    # ---- bounds ----

    def _bound(self, account: _Account, max_concurrent: int | None) -> None:
        own = self._key_limit if max_concurrent is None else max_concurrent
        account.is_bounded = own is not None or self._config.max_queued_requests_per_key is not None
        max_places = self._limit if own is None else min(own, self._limit)
        if account.max_places != max_places:
            account.max_places = max_places
            self._queue.update(account)

    def _check_width(self, account: _Account, sequences: int, param: str) -> None:
        if sequences <= account.max_places:
            return
        text = f"{param}: the request asks for {sequences} sequences; {self._whose} runs"
        bound = f"{self._limit} at most (--max-concurrent-requests)"
        if sequences <= self._limit:
            bound = f"{account.max_places} of this key at most (max_concurrent_requests)"
            if account.max_places == self._key_limit:
                bound = f"{self._key_limit} of a key at most (--max-concurrent-requests-per-key)"
        raise BadRequest(f"{text} {bound}", param=param)

    def _check_room(self, account: _Account, sequences: int) -> None:
        """Raise `TooManyRequests` if there are neither places nor room in the queue."""
        everyone, max_queued = self._all, self._config.max_queued_requests
        # The sequences that would wait because of the bound for all keys (`beyond`), and because of
        # this key's bound (`key_beyond`).
        beyond = everyone.in_flight + everyone.queued + sequences - self._limit
        if account.is_bounded:
            key_max = self._config.max_queued_requests_per_key
            key_max = max_queued if key_max is None else key_max
            key_beyond = account.in_flight + account.queued + sequences - account.max_places
            if max(key_beyond, min(beyond, account.queued + sequences)) > key_max:
                text = f"{account.in_flight} sequences of this key run and {account.queued}"
                self._refuse("key_queue_full", sequences, f"{text} are queued")
        excess = beyond - max_queued
        if excess > 0 and not self._make_room(account, "queued", excess, wanted=sequences):
            text = f"{everyone.in_flight} sequences run and {everyone.queued} are queued"
            self._refuse("queue_full", sequences, text)

    def _check_tokens(self, ticket: Ticket, prompt_tokens: int) -> None:
        """Raise `TooManyRequests` if too many prompt tokens wait. A request may always wait if no
        other does, however long its prompt is.
        """
        account, config = ticket.account, self._config
        others, others_of_key = self._all.queued_tokens, account.queued_tokens
        ticket.prompt_tokens = prompt_tokens
        self._change(account, queued_tokens=prompt_tokens)
        bound = config.max_queued_tokens_per_key
        if bound is not None and others_of_key and others_of_key + prompt_tokens > bound:
            text = f"prompts of this key with {others_of_key} tokens are queued"
            self._refuse("key_queued_tokens", ticket.places, text)
        excess = others + prompt_tokens - config.max_queued_tokens
        if others and excess > 0 and not self._make_room(account, "queued_tokens", excess):
            text = f"prompts with {others} tokens are queued"
            self._refuse("queued_tokens", ticket.places, text)

    def _make_room(
        self, account: _Account, amount: _Amount, excess: int, *, wanted: int = 0
    ) -> bool:
        """Refuse the latest queued requests of the key with the most sequences. Return false,
        refusing none, if that key would then have fewer than this key.
        """
        others = [each for each in self._accounts.values() if getattr(each, amount) >= excess]
        most = max(others, key=lambda each: each.sequences, default=account)
        latest = _latest(most, amount, excess)
        freed = sum(ticket.places for ticket in latest)
        if most.sequences - freed < account.sequences + wanted:
            return False
        for ticket in latest:
            text = "the queue is full and other keys have less here"
            ticket.limit.end(self._refusal("pushed_out", ticket.places, text))
            self._forget(ticket)
        # Give places only after the loop, or a ticket about to be refused could get one.
        self._give_places()
        return True

    def _refuse(self, reason: str, sequences: int, text: str) -> None:
        raise self._refusal(reason, sequences, text)

    def _refusal(self, reason: str, sequences: int, text: str) -> TooManyRequests:
        self._metrics.refused.labels(reason).inc()
        wait_s = self._pace.seconds_until(self._all.queued + sequences, time.monotonic())
        retry_after_s = math.ceil(min(max(1.0, wait_s), _MAX_RETRY_AFTER_S))
        text = f"{self._whose} has no room: {text}; try again in {retry_after_s} s"
        return TooManyRequests(text, retry_after_s=retry_after_s)

    # ---- places ----

    async def _wait(self, ticket: Ticket) -> None:
        ticket.placed = asyncio.get_running_loop().create_future()
        timeout_s = self._config.queue_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await ticket.placed
        except TimeoutError:
            # Meanwhile the request may have been refused to make room (then `check` raises), or may
            # have got its places.
            ticket.limit.check()
            if ticket.waits:
                text = f"no place came free within {timeout_s:g} s (--queue-timeout-s)"
                self._refuse("queue_timeout", ticket.places, text)

    def _give_places(self) -> None:
        while (ticket := self._queue.first()) is not None:
            assert isinstance(ticket, Ticket)
            if self._all.in_flight + ticket.places > self._limit:
                return
            self._change(
                ticket.account,
                in_flight=ticket.places,
                queued=-ticket.places,
                queued_tokens=-ticket.prompt_tokens,
            )
            self._queue.remove(ticket)
            del ticket.account.tickets[ticket]
            ticket.state, ticket.prompt_tokens = "in flight", 0
            if ticket.placed is not None and not ticket.placed.done():
                ticket.placed.set_result(None)

    def _forget(self, ticket: Ticket) -> None:
        """Give back the ticket's places, or remove it from the queue. Idempotent."""
        account, state, ticket.state = ticket.account, ticket.state, "gone"
        if state == "gone":
            return
        if state == "in flight":
            self._pace.record_freed(ticket.places, time.monotonic())
            self._change(account, in_flight=-ticket.places)
            self._queue.update(account)
        else:
            del account.tickets[ticket]
            self._change(account, queued=-ticket.places, queued_tokens=-ticket.prompt_tokens)
            if state == "waiting":
                self._queue.remove(ticket)
        if not account.in_flight and not account.queued:
            del self._accounts[account.key]

    def _change(
        self, account: _Account, *, in_flight: int = 0, queued: int = 0, queued_tokens: int = 0
    ) -> None:
        for each in (account, self._all):
            each.in_flight += in_flight
            each.queued += queued
            each.queued_tokens += queued_tokens
        if queued:
            self._metrics.sequences_queued.set(self._all.queued)
        if queued_tokens:
            self._metrics.prompt_tokens_queued.set(self._all.queued_tokens)
