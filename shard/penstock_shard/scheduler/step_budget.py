"""The tokens and seconds left of a step while it is planned.

Prompts may take less of a step than decodes, and long prompts less than short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_shard.scheduler.rows import Row
from penstock_shard.scheduler.step_time import StepSize, StepTime
from penstock_shard.sequence import Sequence

# Time for long prompts in a step with decodes, as a share of the decodes' time.
_LONG_SHARE = 0.8
UNBOUNDED_S = float("inf")
# Time for prompts of lower classes, as a share of the other rows' time.
_LOWER_SHARE = 0.5
# No class is lower than this class number.
EVERY_CLASS = 2**31
# A scored token counts once more for each `_WIDE_LOGPROBS` wanted log-probabilities, up to
# `_MOST_OFTEN` times, because a step's log-probabilities go to the server in one message.
_WIDE_LOGPROBS = 16_384
_MOST_OFTEN = 16


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    # The largest number of prompt tokens in steps with decodes. Longer prompts count as long: the
    # time of the decodes bounds their chunks.
    max_prefill_tokens: int = 2**31
    # The largest number of prompt tokens that may get log-probabilities in a step.
    max_scored_tokens: int = 2**31
    # True if decodes, which will soon move to another shard, do not bound prompts.
    prompts_first: bool = False


@dataclass(slots=True)
class StepBudget:
    """Tokens and seconds that rows may still take."""

    tokens: int
    step_time: StepTime
    # Prompt tokens that may still get log-probabilities.
    scored_tokens: int = 2**31
    # Tokens left for all prompts. The next 2 fields are tokens and seconds left for long prompts.
    prompt_tokens: int = 0
    long_tokens: int = 0
    long_s: float = UNBOUNDED_S
    # Predicted seconds that rows may take; unbounded unless an objective limits the step.
    time_s: float = UNBOUNDED_S
    # `first_class` is the highest class with prompts to compute. Decodes and that class's prompts
    # take `first_s` seconds. Lower classes' prompts may add `lower_share` of that, but nothing if
    # part of a prompt of the highest class is left for later.
    first_class: int = EVERY_CLASS
    lower_share: float = _LOWER_SHARE
    first_s: float = 0.0
    lower_s: float = 0.0

    def take_decodes(self, sequences: list[Sequence]) -> list[Sequence]:
        return sequences

    def bound_prompts(self, decodes: StepSize, max_prefill_tokens: int) -> None:
        """Set what prompts may take after all decode rows. They may take less if there are decode
        rows.
        """
        self.prompt_tokens = self.tokens
        self.first_s = self.step_time.predict(decodes)
        if decodes.num_decodes:
            self.prompt_tokens = min(self.tokens, max_prefill_tokens)
            self.long_s = self.first_s * _LONG_SHARE
        self.long_tokens = self.prompt_tokens

    def leave_half_to_short(self) -> None:
        """Leave half of the prompt tokens to short prompts, so that they overtake long ones."""
        self.long_tokens = max(1, self.prompt_tokens // 2)

    def most_prompt_tokens(self, sequence: Sequence) -> int:
        """Return the size of the largest chunk of this sequence, if its prompt is short. If the
        size is 0 for a waiting sequence, the sequences behind it get no chunk either.
        """
        if sequence.request.priority <= self.first_class:
            return self.prompt_tokens
        left_s = self.lower_share * self.first_s - self.lower_s
        in_time = self.step_time.prompt_tokens_in(left_s, sequence.num_computed)
        return min(self.prompt_tokens, in_time)

    def chunk_limit(self, sequence: Sequence, *, is_long: bool, probes: bool) -> int:
        """Return the largest size of the next chunk. With `probes`, a long prompt gets a little
        more than is predicted to fit.
        """
        limit = self._chunk_limit(sequence, is_long, probes)
        if limit < sequence.num_uncomputed and sequence.request.priority <= self.first_class:
            self.lower_share = 0.0
        return limit

    def _chunk_limit(self, sequence: Sequence, is_long: bool, probes: bool) -> int:
        limit = self.most_prompt_tokens(sequence)
        if sequence.needs_prompt_logprobs:
            scored = sequence.num_prompt_tokens - 1 - sequence.num_computed
            room = self.scorable(sequence)
            limit = limit if scored <= room else min(limit, room)
        if not is_long:
            return limit
        limit = min(limit, self.long_tokens)
        if self.long_s != UNBOUNDED_S:
            in_time = self.step_time.prompt_tokens_in(self.long_s, sequence.num_computed)
            if probes:
                in_time += max(1, in_time // 8)
            limit = min(limit, max(1, in_time))
        return limit

    def has_room(self, sequence: Sequence, count: int, of_all: int) -> bool:
        """Tell whether `count` tokens of a sequence fit. A step with all its `of_all` tokens left
        takes any count.
        """
        if self.tokens == of_all:
            return True
        is_scored = sequence.needs_prompt_logprobs
        return count <= self.tokens and not (is_scored and count > self.scorable(sequence))

    def scorable(self, sequence: Sequence) -> int:
        """Return how many of the sequence's prompt tokens may still be scored."""
        return self.scored_tokens // _score_weight(sequence)

    def take_chunk(self, row: Row, *, is_long: bool) -> None:
        """Subtract a chunk of a prompt. A chunk with an image may exceed what was left."""
        if self.first_class != EVERY_CLASS:
            seconds = self.step_time.prompt_s(row.start, row.count)
            if row.sequence.request.priority <= self.first_class:
                self.first_s += seconds
            else:
                self.lower_s += seconds
        self.tokens -= row.count
        self.prompt_tokens = max(0, self.prompt_tokens - row.count)
        self.scored_tokens -= row.scored * _score_weight(row.sequence)
        if is_long:
            self.long_tokens = max(0, self.long_tokens - row.count)
            self.long_s -= self.step_time.prompt_s(row.start, row.count)


def _score_weight(sequence: Sequence) -> int:
    return min(_MOST_OFTEN, 1 + (sequence.request.prompt_logprobs or 0) // _WIDE_LOGPROBS)
