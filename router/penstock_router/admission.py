"""How many sequences may be in flight, and whether the router takes requests at all.

Knows numbers only. A request asks for all its places at once and gives them back on every way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock_router.errors import BadRequest, TooManyRequests, Unavailable


class Admission:
    """Bounded places; over the bound the answer is 429, not a queue that only adds waiting."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_flight = 0
        self.stopping = False

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold `count` places, or raise."""
        if self.stopping:
            raise Unavailable("the router is shutting down")
        if count > self._limit:
            text = f"the request asks for {count} sequences; this server runs {self._limit} at most"
            raise BadRequest(text, param="n")
        if self.in_flight + count > self._limit:
            text = f"{self.in_flight} of {self._limit} sequences are in flight; try again shortly"
            raise TooManyRequests(text)
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count
