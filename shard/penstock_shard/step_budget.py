"""What is left of a step while it is filled: tokens and seconds. Knows counts; no request's place.

Prompts have less of a step than decodes, and long prompts less than short ones; what bounds them is
counted here as rows are added, and asked for before each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock_shard.runner.base import ScheduledRequest
from penstock_shard.step_time import StepSize, StepTime

# What prompts that have waited for too long get of a step at least.
_AGED_TOKENS = 16
# What long prompts may take beside decodes, of the time that these take alone.
_LONG_SHARE = 0.8
# Of the tokens and the time that a step's decodes leave of it, drafts may take one in so many.
_DRAFTS_SHARE = 2
UNBOUNDED_S = float("inf")


@dataclass(slots=True)
class StepBudget:
    """Tokens and seconds that rows may still take; each that is added takes its part."""

    tokens: int
    # By what steps took before; unbounded where nobody has said how long it may be.
    time_s: float
    step_time: StepTime
    # Of the tokens, those that prompts may take, and those that long ones may.
    prompt_tokens: int = 0
    long_tokens: int = 0
    long_s: float = UNBOUNDED_S
    # For prompts that have waited for too long, whatever the time.
    aged_tokens: int = _AGED_TOKENS

    def bound_prompts(self, decodes: StepSize, max_prefill_tokens: int) -> None:
        """Decode rows are added: the rest is for prompts, less of it where there are such rows."""
        self.prompt_tokens = self.tokens
        if decodes.num_decodes:
            self.prompt_tokens = min(self.tokens, max_prefill_tokens)
            self.long_s = self.step_time.predict(decodes) * _LONG_SHARE
        self.long_tokens = self.prompt_tokens

    def leave_half_to_short(self) -> None:
        """Short prompts get past long ones."""
        self.long_tokens = max(1, self.prompt_tokens // 2)

    def for_drafts(self) -> tuple[int, float]:
        """Tokens and seconds that drafts may take of what decodes have left."""
        return self.tokens // _DRAFTS_SHARE, self.time_s / _DRAFTS_SHARE

    def chunk_limit(
        self, start: int, *, is_long: bool, is_aged: Callable[[], bool], probes: bool
    ) -> int:
        """The most tokens that there are for a chunk which begins at index `start` of its sequence.

        `is_aged` says whether the request has waited for too long; it is asked where it matters. A
        long prompt that `probes` gets a little more than is foreseen to fit.
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

    def take_drafts(self, rows: Iterable[ScheduledRequest]) -> None:
        """These were given drafts."""
        for row in rows:
            self.tokens -= len(row.drafts)
            self.time_s -= self.step_time.prompt_s(row.start, len(row.drafts))

    def take_chunk(self, row: ScheduledRequest, *, is_long: bool) -> None:
        """This row of a prompt was added."""
        seconds = self.step_time.prompt_s(row.start, row.count)
        self.tokens -= row.count
        self.prompt_tokens -= row.count
        self.aged_tokens -= row.count
        self.time_s -= seconds
        if is_long:
            self.long_tokens -= row.count
            self.long_s -= seconds
