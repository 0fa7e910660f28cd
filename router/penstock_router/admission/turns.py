"""Gives places for slow work to clients: each gets an equal part of the time.

A free place goes to the waiting client whose work has taken the least time so far (start-time fair
queueing, Goyal, Vin and Cheng, 1996). If one client's pieces of work take ten seconds each, the
others wait for one piece, not for all. Idle clients save up no time. If several clients wait for
the same work, it starts in the first turn that one of them gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

# Unfinished work counts as at least this time, or one client could get all free places at once.
_EXPECTED_S = 0.1
# Longer work is "long": while it runs, other clients may use spare places.
LONG_S = 1.0


@dataclass(eq=False, slots=True)
class Place:
    """A place where work runs, in the turn of `client`."""

    client: str
    began_s: float
    timer: asyncio.TimerHandle | None = None
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class _Wish:
    # The clients that wait now.
    clients: Collection[str]
    # One client's work starts in ascending `order`.
    order: Any


class Turns:
    """A number of places. While work in a place takes long, there is one more, up to `spare`, for
    clients without long work, so that a very long task does not delay them.
    """

    def __init__(self, places: int, spare: int = 0) -> None:
        self._num_places = places
        self._num_spare = spare
        self._working: dict[Place, None] = {}
        # In order of arrival.
        self._waiting: dict[asyncio.Future[Place], _Wish] = {}
        # The time spent by each client that waits, works, or has used more than its share.
        self._spent_s: dict[str, float] = {}
        # The spent time of the client that got a place most recently.
        self._now_s = 0.0
        self._refusal: Callable[[], Exception] | None = None

    @property
    def num_working(self) -> int:
        return len(self._working)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self, clients: Collection[str], order: Any = 0) -> Place:
        """Wait for a place in the turn of any of `clients`, which may change meanwhile. Give the
        place back later. Raises the error passed to `stop`.
        """
        if self._refusal is not None:
            raise self._refusal()
        given: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting[given] = _Wish(clients, order)
        self._hand_out()
        try:
            return await given
        except asyncio.CancelledError:
            if not given.cancelled() and given.exception() is None:
                self.give_back(given.result())
            raise
        finally:
            self._waiting.pop(given, None)

    def give_back(self, place: Place) -> None:
        del self._working[place]
        if place.timer is not None:
            place.timer.cancel()
        self._spent_s[place.client] += time.monotonic() - place.began_s
        self._hand_out()

    def stop(self, refusal: Callable[[], Exception]) -> None:
        """Refuse all waiting work and later calls of `take`."""
        self._refusal = refusal
        for given in self._waiting:
            if not given.done():
                given.set_exception(refusal())

    def _hand_out(self) -> None:
        while (found := self._next()) is not None:
            given, client = found
            del self._waiting[given]
            self._now_s = max(self._now_s, self._spent_by(client))
            place = Place(client, time.monotonic())
            self._working[place] = None
            if self._num_spare:
                loop = asyncio.get_running_loop()
                place.timer = loop.call_later(LONG_S, self._became_long, place)
            given.set_result(place)

    def _next(self) -> tuple[asyncio.Future[Place], str] | None:
        """Return the work that gets the next place, and the client whose turn it is; or None."""
        self._note_present()
        of_long = [place.client for place in self._working if place.is_long]
        num_free = self._num_places - len(self._working)
        if num_free + min(len(of_long), self._num_spare) <= 0:
            return None
        barred = of_long if num_free <= 0 else ()
        found = (
            ((self._spent_by(client), wish.order), given, client)
            for given, wish in self._waiting.items()
            for client in wish.clients
            if client not in barred and not given.done()
        )
        # Among equal entries, `min` returns the first.
        first = min(found, key=lambda each: each[0], default=None)
        return None if first is None else first[1:]

    def _note_present(self) -> None:
        """Start new clients at `_now_s`, and forget idle clients that have not spent more than
        that.
        """
        spent_s = self._spent_s
        present = {client for wish in self._waiting.values() for client in wish.clients}
        present.update(place.client for place in self._working)
        if present:
            present.update(client for client, spent in spent_s.items() if spent > self._now_s)
        self._spent_s = {client: spent_s.get(client, self._now_s) for client in present}

    def _spent_by(self, client: str) -> float:
        now_s = time.monotonic()
        own = (place for place in self._working if place.client == client)
        return self._spent_s[client] + sum(max(_EXPECTED_S, now_s - each.began_s) for each in own)

    def _became_long(self, place: Place) -> None:
        place.is_long = True
        self._hand_out()
