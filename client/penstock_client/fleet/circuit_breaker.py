"""A circuit breaker: keeps requests from a shard that fails them, except for occasional trials."""

from __future__ import annotations

from penstock_common.back_off import BackOff

_THRESHOLD = 5
_FIRST_OPEN_S = 0.5
_MAX_OPEN_S = 15.0


class CircuitBreaker:
    """Closed while requests succeed. Opens after `_THRESHOLD` failures in a row; then one request
    may try after each period, which doubles each time. A success closes it.
    """

    __slots__ = ("_failures", "_period", "_try_at_s")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Close the breaker: the shard has a new engine, or a request succeeded."""
        self._failures = 0
        self._period = BackOff(_FIRST_OPEN_S, _MAX_OPEN_S)
        self._try_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Tell whether there were too many failures in a row, and no success since."""
        return self._failures >= _THRESHOLD

    def allows(self, now_s: float) -> bool:
        """Tell whether a request may be sent."""
        return not self.is_open or now_s >= self._try_at_s

    def record_sent(self, now_s: float) -> None:
        """A request was sent; if the breaker is open, no other may be for a while."""
        if self.is_open:
            self._period.lengthen()
            self._try_at_s = now_s + self._period.wait_s

    def record_success(self) -> None:
        """A request gave its first output."""
        if self._failures:
            self.reset()

    def record_failure(self, now_s: float) -> None:
        """A request ended because of the shard."""
        self._failures += 1
        # Later failures are of requests that were already running, or of trials.
        if self._failures == _THRESHOLD:
            self._try_at_s = now_s + self._period.wait_s
