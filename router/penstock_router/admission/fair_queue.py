"""Orders waiting requests: the key with fewest places in flight goes first.

This is max-min fairness by progressive filling (Bertsekas and Gallager, Data Networks, 1987), which
for one resource equals dominant resource fairness (Ghodsi et al., NSDI 2011). A key that asks for
less than an equal part gets all of it, and the others share the rest equally. Keys with equally
many places, and the requests of one key, are served in order of arrival. A request that needs
several places keeps its turn until they are free: smaller requests never overtake it. A key at its
own bound is passed over.

A choice costs a few microseconds, however many keys wait. Priorities play no role here: shards
apply them.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass, field

_FEW_ENTRIES = 64


@dataclass(eq=False, slots=True)
class Share:
    """The places that one key has, and its waiting requests in order."""

    in_flight: int = 0
    # The maximum of `in_flight`. After changing it, call `FairQueue.update`.
    max_places: float = math.inf
    waiting: OrderedDict[Waiting, None] = field(default_factory=OrderedDict)


@dataclass(eq=False, slots=True)
class Waiting:
    """A request for a number of places, which it gets all at once."""

    share: Share
    places: int
    # The position in the order of arrival, over all keys.
    number: int = 0


# The share's places in flight when the entry was pushed, the number of its first request, and that
# request.
_Entry = tuple[int, int, Waiting]


class FairQueue:
    """The waiting requests. After changing a share's `in_flight`, call `update`."""

    def __init__(self) -> None:
        # Entries are never updated, only pushed again; stale ones are dropped when popped, or when
        # there are too many.
        self._heap: list[_Entry] = []
        self._tidy_at = _FEW_ENTRIES
        self._num_added = 0
        self._turn: Waiting | None = None

    def add(self, request: Waiting) -> None:
        request.number = self._num_added
        self._num_added += 1
        request.share.waiting[request] = None
        if len(request.share.waiting) == 1:
            self.update(request.share)

    def remove(self, request: Waiting) -> None:
        """Remove a request that got its places or gave up."""
        waiting = request.share.waiting
        was_first = next(iter(waiting)) is request
        del waiting[request]
        if self._turn is request:
            self._turn = None
        if was_first:
            self.update(request.share)

    def update(self, share: Share) -> None:
        """Note that the share's places in flight, bound or first request changed."""
        if not share.waiting:
            return
        first = next(iter(share.waiting))
        heapq.heappush(self._heap, (share.in_flight, first.number, first))
        if len(self._heap) > self._tidy_at:
            self._heap = [entry for entry in set(self._heap) if _is_current(entry)]
            heapq.heapify(self._heap)
            self._tidy_at = max(_FEW_ENTRIES, 2 * len(self._heap))

    def first(self) -> Waiting | None:
        """Return the request whose turn it is; None if no key may get places. The turn stays with
        this request until it is removed.
        """
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
