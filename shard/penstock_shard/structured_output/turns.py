"""Places that callers get in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable


class Turns:
    """A few places, numbered from 0. Of those who wait for one, callers come in turn."""

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places))
        # In the order in which they came: each with its caller and its round. In a round each
        # caller gets one place.
        self._waiting: dict[asyncio.Future[int], tuple[Hashable, int]] = {}
        self._round = 0

    @contextlib.asynccontextmanager
    async def place(self, caller: Hashable) -> AsyncIterator[int]:
        """A place that is this caller's until the context ends."""
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        own_rounds = (of for who, of in self._waiting.values() if who == caller)
        self._waiting[place] = caller, max(own_rounds, default=self._round) + 1
        self._hand_out()
        try:
            yield await place
        finally:
            self._waiting.pop(place, None)
            if not place.cancelled():
                self._free.append(place.result())
                self._hand_out()

    def _hand_out(self) -> None:
        while self._free and self._waiting:
            place = min(self._waiting, key=lambda place: self._waiting[place][1])
            _, self._round = self._waiting.pop(place)
            if not place.cancelled():
                place.set_result(self._free.pop())
