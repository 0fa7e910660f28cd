"""The rate at which a shard computes prompts, from its load reports."""

from __future__ import annotations

# A step with few tokens takes as long as one with many, so it does not show the rate.
_LEAST_TOKENS = 256
# The weight of a measured rate halves in this time.
_HALF_LIFE_S = 600.0


class PrefillRate:
    """The highest rate between two reports; older rates count less. Lower rates are ignored: decode
    steps compute fewer tokens than they could.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0
        self._rate = 0.0
        self._noted_s = 0.0

    def note(self, tokens_total: int, seconds_total: float, now_s: float) -> None:
        """Note an engine's total tokens and seconds of all steps so far. Smaller totals mean a new
        engine.
        """
        tokens, seconds = tokens_total - self._tokens, seconds_total - self._seconds
        if tokens < 0 or seconds < 0:
            tokens, seconds = tokens_total, seconds_total
        if tokens < _LEAST_TOKENS or seconds <= 0:
            return
        self._tokens, self._seconds = tokens_total, seconds_total
        faded = self._rate * 0.5 ** ((now_s - self._noted_s) / _HALF_LIFE_S)
        self._rate, self._noted_s = max(faded, tokens / seconds), now_s

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 before the first measurement."""
        return self._rate
