"""In which order waiting requests get places: those of the key with fewest in flight go first.

Max-min fairness, by progressive filling (Bertsekas and Gallager, Data Networks, 1987; with one
resource also what dominant resource fairness comes to, Ghodsi et al., NSDI 2011): each place that
comes free goes to the key with the fewest places in flight, so that a key that asks for less than
an equal part gets all it asks for, and the others share the rest equally. Among equals, and within
a key, first come is first served. A request that needs several places keeps its turn until they
are free: requests for fewer never overtake it. A key at its own bound is passed over.

A choice costs a few microseconds, however many keys wait. Priorities are the shards' affair: they
order what is in flight.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass, field

_FEW_ENTRIES = 64


@dataclass(eq=False, slots=True)
class Share:
    """The places that one key has, and its requests that wait for more, in their order."""

    in_flight: int = 0
    # How many places it may have at once. After changing it, call `FairQueue.update`.
    max_places: float = math.inf
    waiting: OrderedDict[Waiting, None] = field(default_factory=OrderedDict)


@dataclass(eq=False, slots=True)
class Waiting:
    """A request for a number of places, all at once."""

    share: Share
    places: int
    # Its number in the order of arrival, over all keys.
    number: int = 0


# A share's places in flight when it was pushed onto the heap, and its first request's number, then
# that request.
_Entry = tuple[int, int, Waiting]


class FairQueue:
    """The waiting requests. After changing a share's `in_flight`, call `moved`."""

    def __init__(self) -> None:
        # Entries are never updated, only pushed anew; stale ones are dropped when they are popped,
        # or when there are too many.
        self._heap: list[_Entry] = []
        self._tidy_at = _FEW_ENTRIES
        self._num_added = 0
        self._turn: Waiting | None = None

    def add(self, request: Waiting) -> None:
        """Queue the request behind its key's other waiting ones."""
        request.number = self._num_added
        self._num_added += 1
        request.share.waiting[request] = None
        if len(request.share.waiting) == 1:
            self.update(request.share)

    def remove(self, request: Waiting) -> None:
        """The request has its places, or gave up."""
        waiting = request.share.waiting
        was_first = next(iter(waiting)) is request
        del waiting[request]
        if self._turn is request:
            self._turn = None
        if was_first:
            self.update(request.share)

    def update(self, share: Share) -> None:
        """The share's places in flight, its bound or its first request have changed."""
        if not share.waiting:
            return
        first = next(iter(share.waiting))
        heapq.heappush(self._heap, (share.in_flight, first.number, first))
        if len(self._heap) > self._tidy_at:
            self._heap = [entry for entry in set(self._heap) if _is_current(entry)]
            heapq.heapify(self._heap)
            self._tidy_at = max(_FEW_ENTRIES, 2 * len(self._heap))

    def first(self) -> Waiting | None:
        """The request whose turn it is, until it is removed; None if no key may get places."""
        while self._turn is None and self._heap:
            entry = heapq.heappop(self._heap)
            in_flight, _, request = entry
            if _is_current(entry) and in_flight + request.places <= request.share.max_places:
                self._turn = request
        return self._turn


def _is_current(entry: _Entry) -> bool:
    in_flight, _, request = entry
    share = request.share
    is_first = bool(share.waiting) and next(iter(share.waiting)) is request
    return is_first and share.in_flight == in_flight
