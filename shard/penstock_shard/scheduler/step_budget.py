"""The rest of a step while it is filled.

Prompts may take less of a step than decodes, and long prompts less than short ones. Each row that
is added is subtracted here, and each chunk is bounded by what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_shard.scheduler.rows import Row
from penstock_shard.scheduler.step_time import StepSize, StepTime
from penstock_shard.sequence import Sequence

# Time that long prompts may take beside decodes, relative to the time of the decodes alone.
_LONG_SHARE = 0.8
UNBOUNDED_S = float("inf")
# A scored token counts once more for each so many log-probabilities that are wanted of it, but no
# more often than that: those of a step go to the server as one message.
_WIDE_LOGPROBS = 16_384
_MOST_OFTEN = 16


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    # Prompt tokens of a step in which other sequences decode. Prompts longer than this count as
    # long: their chunks take no more time than the decodes beside them.
    max_prefill_tokens: int = 2**31
    # Prompt tokens of a step whose log-probabilities are wanted.
    max_scored_tokens: int = 2**31
    # Whether decodes bound no prompts beside them: they are about to leave for another shard.
    prompts_first: bool = False


@dataclass(slots=True)
class StepBudget:
    """Tokens and seconds that rows may still take; each row that is added takes its part."""

    # What the step has room for; of what decodes leave, prompts may take `prompt_tokens`.
    tokens: int
    step_time: StepTime
    # Prompt tokens whose log-probabilities are wanted.
    scored_tokens: int = 2**31
    # What prompts may take, and what long prompts may.
    prompt_tokens: int = 0
    long_tokens: int = 0
    long_s: float = UNBOUNDED_S
    # Predicted with `step_time`; unbounded unless an objective limits the seconds of the step.
    time_s: float = UNBOUNDED_S

    def take_decodes(self, sequences: list[Sequence]) -> list[Sequence]:
        """Take those of the decoding sequences that may have a row."""
        return sequences

    def bound_prompts(self, decodes: StepSize, max_prefill_tokens: int) -> None:
        """Set what prompts may take, once all decode rows are added: less if there are any."""
        self.prompt_tokens = self.tokens
        if decodes.num_decodes:
            self.prompt_tokens = min(self.tokens, max_prefill_tokens)
            self.long_s = self.step_time.predict(decodes) * _LONG_SHARE
        self.long_tokens = self.prompt_tokens

    def leave_half_to_short(self) -> None:
        """Leave half of the prompt tokens to short prompts, so that they overtake long ones."""
        self.long_tokens = max(1, self.prompt_tokens // 2)

    def most_prompt_tokens(self, sequence: Sequence) -> int:
        """The most tokens that a chunk of this sequence may have, if it is short; if there are none
        for a waiting one, there are none for those behind it.
        """
        return self.prompt_tokens

    def chunk_limit(self, sequence: Sequence, *, is_long: bool, probes: bool) -> int:
        """The most tokens for the sequence's next chunk. With `probes` a long prompt gets a little
        more than is predicted to fit.
        """
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
        """Tell whether a step that began with room for `of_all` tokens has some for so many of this
        sequence, or for nothing less if it is empty.
        """
        if self.tokens == of_all:
            return True
        is_scored = sequence.needs_prompt_logprobs
        return count <= self.tokens and not (is_scored and count > self.scorable(sequence))

    def scorable(self, sequence: Sequence) -> int:
        """The number of its prompt's tokens that may still be scored."""
        return self.scored_tokens // _score_weight(sequence)

    def take_chunk(self, row: Row, *, is_long: bool) -> None:
        """Subtract this chunk of a prompt; that of an image may be more than there was for it."""
        self.tokens -= row.count
        self.prompt_tokens = max(0, self.prompt_tokens - row.count)
        self.scored_tokens -= row.scored * _score_weight(row.sequence)
        if is_long:
            self.long_tokens = max(0, self.long_tokens - row.count)
            self.long_s -= self.step_time.prompt_s(row.start, row.count)


def _score_weight(sequence: Sequence) -> int:
    """The weight of each of its scored tokens."""
    return min(_MOST_OFTEN, 1 + (sequence.request.prompt_logprobs or 0) // _WIDE_LOGPROBS)
