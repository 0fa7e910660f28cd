"""Remembers aborts that arrive before their requests, which use another HTTP/2 stream."""

from __future__ import annotations

import time
from collections import OrderedDict

from penstock_common.clock import Clock

# Longest time from an abort to the arrival of its request.
_MEMORY_S = 30.0
_MEMORY_IDS = 200_000


class EarlyAborts:
    """The highest attempt of each request id that was aborted before it arrived."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        # request id -> (time to forget the abort, attempt)
        self._aborts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def remember(self, request_id: str, attempt: int) -> None:
        """Remember an abort of this attempt and lower ones."""
        now_s = self._clock()
        attempt = max(attempt, self._aborts.get(request_id, (0.0, -1))[1])
        self._aborts[request_id] = (now_s + _MEMORY_S, attempt)
        self._aborts.move_to_end(request_id)
        while next(iter(self._aborts.values()))[0] <= now_s:
            self._aborts.popitem(last=False)
        if len(self._aborts) > _MEMORY_IDS:
            self._aborts.popitem(last=False)

    def include(self, request_id: str, attempt: int) -> bool:
        until_s, last_aborted = self._aborts.get(request_id, (0.0, -1))
        return attempt <= last_aborted and self._clock() < until_s
