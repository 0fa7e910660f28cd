"""Measures how long a constraint's masks take, to decide which steps its sequences join.

Time decides nothing else: a token depends only on its mask, whenever that is filled.
"""

from __future__ import annotations

# A step does not wait for masks that take more processor time than this, a tenth of a usual step.
SLOW_S = 0.002
# After a slow mask, a constraint counts as slow for this many masks. The number doubles each time
# it turns slow again.
_FIRST_MASKS = 16
_MOST_MASKS = 4096


class Pace:
    """The pace of one constraint. All its sequences share it, so that they delay only one step."""

    def __init__(self) -> None:
        # For how many masks the constraint still counts as slow, and for how many it did at first.
        self._masks_left = self._masks = 0
        self._next_masks = _FIRST_MASKS

    @property
    def is_slow(self) -> bool:
        """True if masks are filled in the background: sequences join a step once their mask is
        ready.
        """
        return self._masks_left > 0

    def learn(self, seconds: float) -> None:
        """Add a mask's processor time."""
        if seconds <= SLOW_S:
            self._masks_left = max(0, self._masks_left - 1)
            return
        if not self._masks_left:
            self._masks, self._next_masks = self._next_masks, min(2 * self._next_masks, _MOST_MASKS)
        self._masks_left = self._masks
