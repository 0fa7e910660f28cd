"""A request as the engine sees it: token ids, parameters, progress. No torch, no wire, no text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a sequence ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens of one request are drawn; complete, after the model's defaults were filled in.

    `temperature` 0 is greedy (then no other field matters); `top_k` 0 is off; `seed` has 64 bits.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: what is known of it, and how much of that is computed into the KV cache.

    Every token of `token_ids` is known (the prompt, then the output so far); the first
    `num_computed` of them have their keys and values in `block_ids`. There is no prefill phase and
    no decode phase: each step computes some tokens that are known, and a step that reaches the end
    of `token_ids` samples one more.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int
    # Output tokens that were delivered before this attempt began; never sent again.
    num_delivered: int
    sampling: SamplingParams
    # Bound on the output, deliveries of earlier attempts included.
    max_tokens: int
    # Ids that end the sequence: the request's own and, unless ignored, the model's eos ids.
    stop_token_ids: frozenset[int]
    # None: no log-probabilities; 0: the chosen token's; k: the k best besides.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str = ""
    # Order of arrival; a preempted request keeps its own.
    arrival: int = 0

    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    # Chained hashes of the full blocks of `token_ids`, as far as they were needed.
    block_hashes: list[bytes] = field(default_factory=list)
    # How many of `block_ids` are filed under their hashes, or were found there.
    num_published: int = 0
    # Tokens found in the prefix cache when the request was first scheduled; None before.
    cached_tokens: int | None = None
    # Prompt tokens whose log-probabilities have been sent; the first token has none.
    num_prompt_logprobs_sent: int = 0
    preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Some are still to be sent, so the prompt must be computed and not only found."""
        if self.prompt_logprobs is None:
            return False
        return self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1
