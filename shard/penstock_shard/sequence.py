"""A sequence: a request, its tokens so far, and how much of it is computed. No torch, no wire."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock_shard.ipc.request import Pooling, Request

if TYPE_CHECKING:
    from penstock_shard.ipc.logprobs import Logprobs
    from penstock_shard.structured_output.matcher_state import ConstraintState


class SequenceState(enum.Enum):
    """The state in which the scheduler has a sequence: queued, waiting for copies in its blocks,
    running or ended.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of a request that are known, and how many of them are computed into the KV cache.

    There is no prefill phase and no decode phase: each step computes some tokens that are known,
    and a step that reaches the last known token samples one more. Steps overlap, so counts run
    ahead of values: `token_ids` (the prompt, then the output so far) holds what has come back,
    `num_pending` counts tokens that launched steps will sample after those, and `num_computed`
    tokens have been handed to steps; their keys and values are, or are about to be, in its blocks.
    """

    request: Request
    # Four bytes each, where a list would take some forty.
    token_ids: array[int]
    num_prompt_tokens: int
    # Output tokens that were delivered before this attempt began; never sent again.
    num_delivered: int
    # The adapter's index in the runner; 0 without one.
    adapter_index: int = 0
    # How far its constraint has got, once that is compiled; it goes with the sequence wherever that
    # is computed again.
    constraint: ConstraintState | None = None
    # Order and time of arrival; a sequence that is preempted keeps its own.
    arrival: int = 0
    arrived_s: float = 0.0

    state: SequenceState = SequenceState.WAITING
    # Where the runner keeps what it knows of the sequence, while it runs and until the last step
    # that has a row of it is collected; -1 without one.
    slot: int = -1
    num_pending: int = 0
    num_computed: int = 0
    # Launched steps that have a row of this sequence and are not collected. Until they are, its
    # blocks and its slot stay its own, whatever becomes of it.
    num_steps_in_flight: int = 0
    # When its last token came back.
    last_token_s: float = 0.0
    # Tokens found in the prefix cache when the sequence was first scheduled; None before.
    cached_tokens: int | None = None
    # Prompt tokens whose log-probabilities have been sent; the first token has none.
    num_prompt_logprobs_sent: int = 0
    preemptions: int = 0
    # Steps that computed a chunk of it and sampled nothing.
    num_partial_steps: int = 0
    # Output tokens that took no step of their own, because drafts were accepted.
    num_accepted_drafts: int = 0

    @classmethod
    def of(cls, request: Request, adapter_index: int = 0) -> Sequence:
        """The sequence of a request that has just arrived."""
        token_ids = array("I", request.prompt + request.output)
        num_prompt_tokens = request.num_prompt_tokens
        num_delivered = len(token_ids) - num_prompt_tokens
        return cls(request, token_ids, num_prompt_tokens, num_delivered, adapter_index)

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that have come back."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Tell whether some are still to be sent, so the prompt must be computed, not taken from
        the cache.
        """
        if self.request.prompt_logprobs is None:
            return False
        return self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1

    @property
    def needs_whole_prompt(self) -> bool:
        """Tell whether every prompt token must be computed, the prefix cache not used."""
        return self.needs_prompt_logprobs or self.request.pooling is Pooling.MEAN

    def end_outside_images(self, end: int) -> int:
        """`end`, or where the image begins of whose tokens only some would be before it."""
        for image in self.request.images:
            if image.offset < end < image.offset + image.num_tokens:
                return image.offset
        return end

    def image_at(self, start: int) -> int:
        """Count the tokens of the image that begins there; 0 if none does."""
        lengths = (image.num_tokens for image in self.request.images if image.offset == start)
        return next(lengths, 0)

    def take_unsent(self, start: int, prompt_logprobs: Logprobs) -> Logprobs:
        """Take those prompt log-probabilities of a row that began at `start` that were not sent
        before the sequence was preempted; they count as sent now.
        """
        known = self.num_prompt_logprobs_sent - start
        if known > 0:
            prompt_logprobs.drop_first(known)
        self.num_prompt_logprobs_sent += len(prompt_logprobs.chosen)
        return prompt_logprobs
