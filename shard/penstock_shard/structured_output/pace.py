"""How slowly masks of a constraint are filled, and so in which steps its sequences take part.

Time decides nothing else: a token depends on its mask, whenever that is filled.
"""

from __future__ import annotations

# Processor time of a mask for which a step should not wait: some tenth of a step.
SLOW_S = 0.002
# For how many masks in a row, after a slow one, a constraint counts as slow: at first, and at most.
# Each time that it turns slow again it does so for twice as many.
_FIRST_MASKS = 16
_MOST_MASKS = 4096


class Pace:
    """The pace of one constraint. All its sequences share it, so that they hold up one step and not
    one each.
    """

    def __init__(self) -> None:
        # How many masks are left until it is not slow any more, of how many in a row.
        self._masks_left = self._masks = 0
        self._next_masks = _FIRST_MASKS

    @property
    def is_slow(self) -> bool:
        """Whether masks are filled aside, and sequences join a step once theirs is there."""
        return self._masks_left > 0

    def learn(self, seconds: float) -> None:
        """Take the processor time of a mask."""
        if seconds <= SLOW_S:
            self._masks_left = max(0, self._masks_left - 1)
            return
        if not self._masks_left:
            self._masks, self._next_masks = self._next_masks, min(2 * self._next_masks, _MOST_MASKS)
        self._masks_left = self._masks
