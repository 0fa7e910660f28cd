"""How much a step may compute: as much as the limits say, and less after one that ran out of device
memory.

A step that fails halves the sequences that a step may have and, where it computed more than one
token of any sequence, the tokens too. After some steps without another failure both grow again.
When a step fails after that, twice as many must pass before they grow the next time, so that a
prompt which starts over at every failure still gets done.
"""

from __future__ import annotations

from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import Batch

# Chunks are not made smaller than this: memory that lacks room for so few lacks it for one.
_LEAST_TOKENS = 16
# Good steps before the bounds begin to grow, at first and at most; and in how many steps a bound
# would grow from nothing to its limit.
_CAREFUL_STEPS = 64
_MOST_CAREFUL_STEPS = 4096
_GROWING_STEPS = 64

# How far a request has got: its id, its attempt, how many tokens are known.
_Place = tuple[str, int, int]


class StepBounds:
    """The most `tokens` and `sequences` of a step; `reduced` while they are below the limits."""

    def __init__(self, max_tokens: int, max_sequences: int) -> None:
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self.tokens = max_tokens
        self.sequences = max_sequences
        self.reduced = False
        self._good_steps = 0
        self._careful_steps = _CAREFUL_STEPS
        # Failed steps that could not be smaller, since the bounds were last at the limits.
        self._failed_alone: set[_Place] = set()

    def is_hopeless(self, failed: Batch, first: Sequence, least: int = 1) -> bool:
        """Whether memory will never suffice for this failed step, whose first row is of `first`: it
        had no other, and few tokens or the `least` it could have, and has failed before with the
        sequence at the same token.
        """
        return _is_least(failed, least) and _place(first) in self._failed_alone

    def shrink(self, failed: Batch, first: Sequence, least: int = 1) -> None:
        """Halve the bounds: this step, whose first row is of `first`, ran out of memory."""
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
        """Count a step that had enough memory while the bounds are reduced; grow them in time."""
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
    """Whether the step could not have been smaller."""
    is_small = failed.counts[0] <= max(_LEAST_TOKENS, least)
    return failed.num_rows == 1 and not failed.drafts[0] and is_small


def _place(sequence: Sequence) -> _Place:
    return sequence.request.request_id, sequence.request.attempt, len(sequence.token_ids)


def _grown(bound: int, most: int) -> int:
    return min(most, bound + max(1, most // _GROWING_STEPS))
