"""How much a step may compute: as much as the limits say, and less after one that memory did not
hold. Knows plans and numbers only.

A step that fails halves what steps may have, of sequences and, where it computed more than one
token of any, of tokens. When a while has gone by without another, both grow again; each time that
was too soon, the next while is twice as long, so that a prompt which begins anew whenever a step
fails comes to its end.
"""

from __future__ import annotations

from penstock_shard.runner.base import StepPlan

# Chunks are not made smaller than this: what does not hold so few would not hold one.
_LEAST_TOKENS = 16
# So many steps go by before the bounds grow, at first and at most; in so many parts of the whole.
_CAREFUL_STEPS = 64
_MOST_CAREFUL_STEPS = 4096
_GROWING_STEPS = 64

# How far a request has come: its id, the attempt, tokens known.
_Place = tuple[str, int, int]


class StepBounds:
    """`tokens` and `sequences` of a step; `reduced` while they are less than they may be."""

    def __init__(self, max_tokens: int, max_sequences: int) -> None:
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self.tokens = max_tokens
        self.sequences = max_sequences
        self.reduced = False
        self._good_steps = 0
        self._careful_steps = _CAREFUL_STEPS
        # Failed steps of the smallest kind, since the bounds were last what they may be.
        self._failed_alone: set[_Place] = set()

    def is_hopeless(self, plan: StepPlan) -> bool:
        """Whether memory will never hold what this failed step computed: it had one request only
        and few tokens, and one like it has failed since that request last got any further.
        """
        return _place_alone(plan) in self._failed_alone

    def shrink(self, plan: StepPlan) -> None:
        """Memory did not hold this step."""
        self.sequences = max(1, min(self.sequences, len(plan.rows)) // 2)
        num_tokens = plan.num_tokens
        if num_tokens > len(plan.rows):
            least = min(_LEAST_TOKENS, self._max_tokens)
            self.tokens = max(least, min(self.tokens, num_tokens) // 2)
        if self._good_steps >= self._careful_steps:
            self._careful_steps = min(2 * self._careful_steps, _MOST_CAREFUL_STEPS)
        if (place := _place_alone(plan)) is not None:
            self._failed_alone.add(place)
        self.reduced = True
        self._good_steps = 0

    def recover(self) -> None:
        """Memory held a step, while bounds are reduced."""
        self._good_steps += 1
        if self._good_steps < self._careful_steps:
            return
        self.tokens = _grown(self.tokens, self._max_tokens)
        self.sequences = _grown(self.sequences, self._max_sequences)
        full = (self._max_tokens, self._max_sequences)
        self.reduced = (self.tokens, self.sequences) != full
        if not self.reduced:
            self._failed_alone.clear()


def _place_alone(plan: StepPlan) -> _Place | None:
    """Where the only request of a step stands; None if the step could have been a smaller one."""
    first, *others = plan.rows
    if others or first.drafts or first.count > _LEAST_TOKENS:
        return None
    request = first.request
    return request.request_id, request.attempt, len(request.token_ids)


def _grown(bound: int, most: int) -> int:
    return min(most, bound + max(1, most // _GROWING_STEPS))
