"""Which shard takes the next request: small pure functions of a snapshot. No I/O, no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What one request in a shard's batch costs the others, in tokens of prompt still to be computed.
# A decode row adds one token to each step; over the life of a typical answer that is a few hundred.
_TOKENS_OF_A_REQUEST = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shard as a policy sees it: what it last reported, and what was sent since."""

    address: str
    running: int
    waiting: int
    queued_prompt_tokens: int
    # Credit for what the report cannot know yet, or many requests of one moment pick one shard.
    sent_requests: int
    sent_prompt_tokens: int

    @property
    def load_tokens(self) -> int:
        """Work ahead of a new request, in tokens."""
        requests = self.running + self.waiting + self.sent_requests
        return requests * _TOKENS_OF_A_REQUEST + self.queued_prompt_tokens + self.sent_prompt_tokens


def least_load(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the least work ahead; the first of equals. `candidates` is not empty."""
    return min(candidates, key=lambda candidate: candidate.load_tokens)
