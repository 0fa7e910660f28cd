"""The bounds of a step: the configured limits, or less after a step ran out of device memory.

A failed step halves the bound on sequences. If it had more tokens than rows, it also halves the
bound on tokens. Both grow again after some good steps. A failure after that doubles the number of
good steps needed, so that a prompt which each failure restarts can be completed.
"""

from __future__ import annotations

from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import Batch

# If memory does not suffice for 16 tokens, it does not suffice for one.
_LEAST_TOKENS = 16
# `_CAREFUL_STEPS`: good steps before the bounds grow, at first; `_MOST_CAREFUL_STEPS`: at most.
# `_GROWING_STEPS`: steps in which a bound would grow from 0 to its limit.
_CAREFUL_STEPS = 64
_MOST_CAREFUL_STEPS = 4096
_GROWING_STEPS = 64

# A request's progress: id, attempt, number of known tokens.
_Place = tuple[str, int, int]


class StepBounds:
    """Bounds on a step's `tokens` and `sequences`. If `reduced`, they are below the limits."""

    def __init__(self, max_tokens: int, max_sequences: int) -> None:
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self.tokens = max_tokens
        self.sequences = max_sequences
        self.reduced = False
        self._good_steps = 0
        self._careful_steps = _CAREFUL_STEPS
        # Progress of requests in failed steps that could not be smaller. Emptied when the bounds
        # reach the limits.
        self._failed_alone: set[_Place] = set()

    def is_hopeless(self, failed: Batch, first: Sequence, least: int = 1) -> bool:
        """Tell whether memory will never suffice for a failed step, whose first row is of `first`:
        the step could not be smaller (one row of `least` or a few tokens), and failed before at the
        same token.
        """
        return _is_least(failed, least) and _place(first) in self._failed_alone

    def shrink(self, failed: Batch, first: Sequence, least: int = 1) -> None:
        """Halve the bounds after a step ran out of memory. Its first row is of `first`."""
        self.sequences = max(1, min(self.sequences, failed.num_rows) // 2)
        num_tokens = failed.num_tokens
        if num_tokens > failed.num_rows:
            half = min(self.tokens, num_tokens) // 2
            self.tokens = max(min(_LEAST_TOKENS, self._max_tokens), half)
        if self._good_steps >= self._careful_steps:
            self._careful_steps = min(2 * self._careful_steps, _MOST_CAREFUL_STEPS)
        if _is_least(failed, least):
            self._failed_alone.add(_place(first))
        self.reduced = True
        self._good_steps = 0

    def recover(self) -> None:
        """Count a good step with reduced bounds. After enough of these the bounds grow."""
        self._good_steps += 1
        if self._good_steps < self._careful_steps:
            return
        self.tokens = _grown(self.tokens, self._max_tokens)
        self.sequences = _grown(self.sequences, self._max_sequences)
        full = (self._max_tokens, self._max_sequences)
        self.reduced = (self.tokens, self.sequences) != full
        if not self.reduced:
            self._failed_alone.clear()


def _is_least(failed: Batch, least: int) -> bool:
    """Tell whether the step could not have been smaller."""
    is_small = failed.counts[0] <= max(_LEAST_TOKENS, least)
    return failed.num_rows == 1 and not failed.drafts[0] and is_small


def _place(sequence: Sequence) -> _Place:
    return sequence.request.request_id, sequence.request.attempt, len(sequence.token_ids)


def _grown(bound: int, most: int) -> int:
    return min(most, bound + max(1, most // _GROWING_STEPS))
