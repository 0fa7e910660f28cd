"""A sequence: a request and the state of its computation."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import Pooling

if TYPE_CHECKING:
    from penstock_proto.types import Logprobs
    from penstock_shard.structured_output.matcher_state import ConstraintState


class SequenceState(enum.Enum):
    """A sequence's state in the scheduler. While LOADING, it waits for copies of KV blocks."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """The known tokens of a request, and the number of tokens that are computed.

    A step that computes the last known token samples the next token. A step is launched before the
    results of earlier steps come back, so counts are ahead of token values. `token_ids` has the
    prompt and the output tokens that came back. `num_pending` counts the tokens that launched steps
    will sample. `num_computed` counts the tokens of launched steps: their keys and values are, or
    soon will be, in the KV cache.
    """

    request: EngineRequest
    # An array takes 4 bytes a token; a list would take about 40.
    token_ids: array[int]
    num_prompt_tokens: int
    # Output tokens of earlier attempts, which are not sent again.
    num_delivered: int
    # The adapter's index in the runner; 0 without one.
    adapter_index: int = 0
    # None until the constraint is compiled. Preemption does not change the state.
    constraint: ConstraintState | None = None
    # The order and the time of arrival, which preemption does not change.
    arrival: int = 0
    arrived_s: float = 0.0

    state: SequenceState = SequenceState.WAITING
    # The index in the runner's arrays, from the first step until the last step is collected; else
    # -1.
    slot: int = -1
    num_pending: int = 0
    num_computed: int = 0
    # Launched steps with a row of this sequence. Until all are collected, the sequence keeps its
    # blocks and its slot, even if it has ended.
    num_steps_in_flight: int = 0
    # The time at which the last token came back.
    last_token_s: float = 0.0
    # Tokens found in the prefix cache by the first scheduling; None before.
    cached_tokens: int | None = None
    # Prompt tokens whose log-probabilities were sent. The first token has none.
    num_prompt_logprobs_sent: int = 0
    preemptions: int = 0
    # Steps that computed a chunk of the prompt and sampled nothing.
    num_partial_steps: int = 0
    # Output tokens that needed no step, because drafts were accepted.
    num_accepted_drafts: int = 0

    @classmethod
    def of(cls, request: EngineRequest, adapter_index: int = 0) -> Sequence:
        token_ids = array("I", request.prompt + request.output)
        num_prompt_tokens = request.num_prompt_tokens
        num_delivered = len(token_ids) - num_prompt_tokens
        return cls(request, token_ids, num_prompt_tokens, num_delivered, adapter_index)

    @property
    def num_tokens(self) -> int:
        """The number of known and pending tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens that came back."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if prompt log-probabilities are still to be sent."""
        if self.request.prompt_logprobs is None:
            return False
        return self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1

    @property
    def needs_whole_prompt(self) -> bool:
        """True if every prompt token must be computed, without the prefix cache."""
        return self.needs_prompt_logprobs or self.request.pooling is Pooling.MEAN

    def end_outside_images(self, end: int) -> int:
        """Return `end`; if an image spans it, the position at which the image begins."""
        for image in self.request.images:
            if image.offset < end < image.offset + image.num_tokens:
                return image.offset
        return end

    def image_at(self, start: int) -> int:
        """Count the tokens of the image that begins at `start`; 0 if none does."""
        lengths = (image.num_tokens for image in self.request.images if image.offset == start)
        return next(lengths, 0)

    def take_unsent(self, start: int, prompt_logprobs: Logprobs) -> Logprobs:
        """Return the prompt log-probabilities of a row that began at `start`, without those that
        were sent before a preemption. All that are returned count as sent.
        """
        known = self.num_prompt_logprobs_sent - start
        if known > 0:
            prompt_logprobs.drop_first(known)
        self.num_prompt_logprobs_sent += len(prompt_logprobs.chosen)
        return prompt_logprobs
