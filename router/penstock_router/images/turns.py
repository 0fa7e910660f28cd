"""Places for work that takes a while: clients get them in turn, and a bounded number waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock_router.admission.fair_queue import FairQueue, Share, Waiting
from penstock_router.admission.shared_budget import SharedBudget
from penstock_router.errors import TooManyRequests

_MAX_WAITING = 256
_MAX_WAIT_S = 30.0


class Turns:
    """So many places. A client waits with at most as many images as are still free."""

    def __init__(self, places: int, what_for: str) -> None:
        """`what_for` ends a sentence: "too many images wait to be ..."."""
        self._free = places
        self._what_for = what_for
        self._queue = FairQueue()
        self._waiting = SharedBudget(_MAX_WAITING)
        self._shares: dict[str, Share] = {}
        self._granted: dict[Waiting, asyncio.Event] = {}

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Has a place. Raises `TooManyRequests` where too many wait, or after waiting too long."""
        share = self._shares.setdefault(client, Share())
        try:
            await self._wait(client, share)
            try:
                yield
            finally:
                self._give_back(share)
        finally:
            if not (share.in_flight or share.waiting):
                self._shares.pop(client, None)

    async def _wait(self, client: str, share: Share) -> None:
        request, granted = Waiting(share, 1), asyncio.Event()
        with self._waiting.hold(client) as waiting:
            waiting.grow(1, lambda *_: self._refusal())
            self._granted[request] = granted
            self._queue.add(request)
            self._hand_out()
            try:
                async with asyncio.timeout(_MAX_WAIT_S):
                    await granted.wait()
            except BaseException as error:
                if granted.is_set():
                    self._give_back(share)
                else:
                    del self._granted[request]
                    self._queue.remove(request)
                    self._hand_out()
                if isinstance(error, TimeoutError):
                    raise self._refusal() from None
                raise

    def _give_back(self, share: Share) -> None:
        self._free += 1
        share.in_flight -= 1
        self._queue.update(share)
        self._hand_out()

    def _refusal(self) -> TooManyRequests:
        return TooManyRequests(f"too many images wait to be {self._what_for}; try again shortly")

    def _hand_out(self) -> None:
        while self._free and (request := self._queue.first()) is not None:
            self._free -= 1
            request.share.in_flight += 1
            self._queue.remove(request)
            self._granted.pop(request).set()
