"""Predicts how many blocks can be copied in a share of a step's time: steps wait for copies."""

from __future__ import annotations

from collections.abc import Sequence

# The number of blocks to copy before any copies were timed.
_FIRST_BLOCKS = 8
# Weight of the latest turn in the mean.
_LATEST = 0.25


class CopyPace:
    """The pace of copies in one direction: to or from the device."""

    def __init__(self) -> None:
        self._block_s = 0.0

    def blocks_in(self, seconds: float) -> int:
        """Count the blocks that can be copied in `seconds`, at least one."""
        if not self._block_s:
            return _FIRST_BLOCKS
        return max(1, int(seconds / self._block_s))

    def learn(self, ends_s: Sequence[float]) -> None:
        """Learn from the clock times at which a turn's copies ended. The first copy may have waited
        for a step, so its time does not count.
        """
        if len(ends_s) < 2:
            return
        block_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
        weight = _LATEST if self._block_s else 1.0
        self._block_s += weight * (block_s - self._block_s)
