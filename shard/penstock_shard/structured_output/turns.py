from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Hashable


class Turns:
    """Places, numbered from 0, which waiting callers get in turn. Work for several callers gets a
    place at the first turn of any of them.
    """

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places))
        # Work that waits for a place, in order of arrival, and its callers.
        self._waiting: dict[asyncio.Future[int], Collection[Hashable]] = {}
        # The round in which each caller gets its next place: one per round.
        self._rounds: dict[Hashable, int] = {}
        self._round = 0

    @contextlib.asynccontextmanager
    async def place(self, callers: Collection[Hashable]) -> AsyncIterator[int]:
        """Hold a place until the context ends. `callers` may change while the work waits."""
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[place] = callers
        self._hand_out()
        try:
            yield await place
        finally:
            self._waiting.pop(place, None)
            if not place.cancelled():
                self._free.append(place.result())
                self._hand_out()

    def _hand_out(self) -> None:
        while self._free:
            waiting = {place: who for place, who in self._waiting.items() if not place.cancelled()}
            callers = dict.fromkeys(caller for who in waiting.values() for caller in who)
            # A new caller begins in the round after the present one.
            self._rounds = {each: self._rounds.get(each, self._round + 1) for each in callers}
            if not callers:
                return
            self._round = min(self._rounds.values())
            place, caller = next(
                (place, caller)
                for place, who in waiting.items()
                for caller in who
                if self._rounds[caller] == self._round
            )
            self._rounds[caller] += 1
            del self._waiting[place]
            place.set_result(self._free.pop())
