"""What is left of a step while it is filled: tokens and seconds. Knows counts, and not the order of
requests.

Prompts may take less of a step than decodes, and long prompts less than short ones. Each row that
is added is subtracted here, and each chunk is bounded by what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock_shard.rows import Row
from penstock_shard.step_time import StepSize, StepTime

# Tokens of a step that prompts which have waited too long get at least, whatever time is left.
_AGED_TOKENS = 16
# Time that long prompts may take beside decodes, relative to the time of the decodes alone.
_LONG_SHARE = 0.8
# Drafts may take one part in this many of the tokens and the time that a step's decodes leave.
_DRAFTS_SHARE = 2
UNBOUNDED_S = float("inf")


@dataclass(slots=True)
class StepBudget:
    """Tokens and seconds that rows may still take; each row that is added takes its part."""

    tokens: int
    # Predicted with `step_time`; unbounded where no request limits the seconds between tokens.
    time_s: float
    step_time: StepTime
    # How many of `tokens` prompts may take, and how many long prompts may.
    prompt_tokens: int = 0
    long_tokens: int = 0
    long_s: float = UNBOUNDED_S
    # Tokens for prompts that have waited too long, whatever `time_s` is.
    aged_tokens: int = _AGED_TOKENS
    # Prompt tokens whose log-probabilities are wanted.
    scored_tokens: int = 2**31

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

    def for_drafts(self) -> tuple[int, float]:
        """The tokens and seconds, left by the decodes, that drafts may take."""
        return self.tokens // _DRAFTS_SHARE, self.time_s / _DRAFTS_SHARE

    def chunk_limit(
        self, start: int, *, is_long: bool, is_aged: Callable[[], bool], probes: bool
    ) -> int:
        """The most tokens for a chunk that begins at index `start` of its sequence.

        `is_aged` tells whether the request has waited too long; it is called only where that
        matters. With `probes` a long prompt gets a little more than is predicted to fit.
        """
        limit = min(self.tokens, self.prompt_tokens)
        if self.time_s != UNBOUNDED_S:
            in_time = self.step_time.prompt_tokens_in(self.time_s, start)
            aged = self.aged_tokens > in_time and is_aged()
            limit = min(limit, self.aged_tokens if aged else in_time)
        if not is_long:
            return limit
        limit = min(limit, self.long_tokens)
        if self.long_s != UNBOUNDED_S:
            in_time = self.step_time.prompt_tokens_in(self.long_s, start)
            if probes:
                in_time += max(1, in_time // 8)
            limit = min(limit, max(1, in_time))
        return limit

    def take_drafts(self, rows: Iterable[Row]) -> None:
        """Subtract the drafts of these rows."""
        for row in rows:
            self.tokens -= len(row.drafts)
            self.time_s -= self.step_time.prompt_s(row.start, len(row.drafts))

    def take_chunk(self, row: Row, *, is_long: bool) -> None:
        """Subtract this chunk of a prompt."""
        seconds = self.step_time.prompt_s(row.start, row.count)
        self.tokens -= row.count
        self.prompt_tokens -= row.count
        self.aged_tokens -= row.count
        self.scored_tokens -= row.scored
        self.time_s -= seconds
        if is_long:
            self.long_tokens -= row.count
            self.long_s -= seconds
