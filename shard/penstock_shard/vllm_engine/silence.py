"""Bounds how long vLLM's core may be silent before it counts as hung. vLLM does not report when a
step begins.
"""

from __future__ import annotations

import time

# In seconds: twice the longest step with only decodes, on any device.
BASE_S = 30.0
# Seconds for a step of a new size, which may first compile kernels.
FIRST_S = 300.0
# A prompt may be this many times slower beside many decodes than alone.
_SLOWER = 4.0
# Seconds after a step within which the core begins the next, if it has work.
_BEGINS_S = 1.0


class Silence:
    """Computes the allowed silence from waiting prompt tokens. A step may compute
    `max_step_tokens`, at the rate of earlier steps.
    """

    def __init__(self, max_step_tokens: int) -> None:
        self._most = max_step_tokens
        self._waiting = 0
        self._is_busy = False
        self._last_s = time.monotonic()
        self._sizes: set[int] = set()
        self._computed = 0
        self._seconds = 0.0

    def begin(self, waiting_tokens: int) -> None:
        """Record a new request; `waiting_tokens` counts prompt tokens that are not computed yet. If
        the running step began before, it does not compute these.
        """
        now_s = time.monotonic()
        if not self._is_busy:
            self._last_s = now_s
        self._is_busy = True
        if now_s - self._last_s < _BEGINS_S:
            self._waiting = waiting_tokens

    def note_step(self, prompt_tokens: int, waiting_tokens: int, *, is_busy: bool) -> None:
        """Record a finished step, by the prompt tokens that it computed and those that are left."""
        now_s = time.monotonic()
        self._sizes.add(self._size)
        self._computed += prompt_tokens
        if self._waiting:
            self._seconds += now_s - self._last_s
        self._last_s = now_s
        self._waiting = waiting_tokens
        self._is_busy = is_busy

    @property
    def silent_s(self) -> float:
        """Seconds for which the core has been silent with work to do."""
        return time.monotonic() - self._last_s if self._is_busy else 0.0

    @property
    def allowed_s(self) -> float:
        """Seconds for which the core may be silent."""
        if self._size not in self._sizes:
            return FIRST_S
        if not self._computed:
            return BASE_S
        tokens = min(self._waiting, self._most)
        return BASE_S + _SLOWER * tokens * self._seconds / self._computed

    @property
    def _size(self) -> int:
        """The size of the next step: the bit length of its number of tokens."""
        return min(self._waiting, self._most).bit_length()
