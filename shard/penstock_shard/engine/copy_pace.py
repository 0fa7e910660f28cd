"""How many blocks a turn copies: as many as fit into a share of a step, by what copies took so far.

Steps wait for copies. What is fast enough for one device and model is too little for another.
"""

from __future__ import annotations

from collections.abc import Sequence

# Before any copies were timed.
_FIRST_BLOCKS = 8
# Weight of the latest turn.
_LATEST = 0.25


class CopyPace:
    """Copies in one direction."""

    def __init__(self) -> None:
        self._block_s = 0.0

    def blocks_in(self, seconds: float) -> int:
        """How many may be copied in so many seconds, at least one."""
        if not self._block_s:
            return _FIRST_BLOCKS
        return max(1, int(seconds / self._block_s))

    def learn(self, ends_s: Sequence[float]) -> None:
        """When each copy of a turn was over, by a clock. The first has waited for the step before
        it.
        """
        if len(ends_s) < 2:
            return
        block_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
        weight = _LATEST if self._block_s else 1.0
        self._block_s += weight * (block_s - self._block_s)
