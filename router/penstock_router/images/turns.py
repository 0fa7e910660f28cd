"""Places for work that takes a while: clients share them by time, and a bounded number waits.

A place that comes free goes to the waiting client whose work has taken the least time so far
(start-time fair queueing, Goyal, Vin and Cheng, 1996): one whose images take ten seconds each
delays others by one of these, not by all. Who has nothing to do saves up no time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from penstock_router.admission.shared_budget import SharedBudget
from penstock_router.errors import TooManyRequests

_MAX_WAITING = 256
_MAX_WAIT_S = 30.0
# What work counts as until it has ended, so that one client does not get all free places at once.
_EXPECTED_S = 0.1


@dataclass(eq=False, slots=True)
class _Client:
    """With work that waits or is being done."""

    spent_s: float
    num_working: int = 0
    # In the order of arrival; set: it has its place.
    waiting: dict[asyncio.Event, None] = field(default_factory=dict)


class Turns:
    """So many places. A client waits for at most as many as others may still wait for."""

    def __init__(self, places: int, what_for: str) -> None:
        """`what_for` ends a sentence: "too many images wait to be ..."."""
        self.num_free = places
        self._what_for = what_for
        self._clients: dict[str, _Client] = {}
        self._waiting = SharedBudget(_MAX_WAITING)
        # What the client had spent that was the last to get a place.
        self._now_s = 0.0

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Has a place. Raises `TooManyRequests` where too many wait, or after waiting too long."""
        own = self._clients.setdefault(client, _Client(self._now_s))
        try:
            await self._wait(client, own)
            began_s = time.monotonic()
            try:
                yield
            finally:
                self._give_back(own, time.monotonic() - began_s)
        finally:
            if not (own.num_working or own.waiting):
                self._clients.pop(client, None)

    async def _wait(self, client: str, own: _Client) -> None:
        given = asyncio.Event()
        with self._waiting.hold(client) as places:
            places.grow(1, lambda *_: self._refusal())
            own.waiting[given] = None
            self._hand_out()
            try:
                async with asyncio.timeout(_MAX_WAIT_S):
                    await given.wait()
            except BaseException as error:
                if given.is_set():
                    self._give_back(own, 0)
                else:
                    del own.waiting[given]
                if isinstance(error, TimeoutError):
                    raise self._refusal() from None
                raise

    def _refusal(self) -> TooManyRequests:
        return TooManyRequests(f"too many images wait to be {self._what_for}; try again shortly")

    def _hand_out(self) -> None:
        while self.num_free:
            waiting = [each for each in self._clients.values() if each.waiting]
            if not waiting:
                return
            client = min(waiting, key=lambda each: each.spent_s)
            given = next(iter(client.waiting))
            del client.waiting[given]
            given.set()
            self.num_free -= 1
            client.num_working += 1
            self._now_s = client.spent_s
            client.spent_s += _EXPECTED_S

    def _give_back(self, client: _Client, took_s: float) -> None:
        self.num_free += 1
        client.num_working -= 1
        client.spent_s += took_s - _EXPECTED_S
        self._hand_out()
