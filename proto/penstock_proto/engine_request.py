"""The request that an engine takes: checked and complete. A token depends on nothing else.

A shard's server makes it from a `GenerationRequest`, whose absent fields mean the model's defaults.
"""

from __future__ import annotations

import msgspec

from penstock_proto.types import (
    Constraint,
    EngineSampling,
    Objective,
    Pooling,
    PromptImage,
    ThinkingBudget,
)


class EngineRequest(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A sequence to generate, checked, with the model's defaults filled in.

    With `pooling` it is an embedding request: `max_tokens` is 1, and the prompt's vector comes back
    in place of that token.
    """

    request_id: str
    attempt: int
    # Token ids, unsigned 32-bit little-endian. `output` was delivered before this attempt began.
    prompt: bytes
    output: bytes = b""
    sampling: EngineSampling
    # The maximum number of output tokens, including `output`.
    max_tokens: int
    # No stop token is drawn while the output, including `output`, is shorter than this.
    min_tokens: int = 0
    # Ids that end the sequence: the request's own and, unless ignored, the model's eos ids.
    stop_token_ids: frozenset[int] = frozenset()
    # Ids that end the sequence if its constraint leaves nothing else to draw.
    reluctant_stop_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    thinking_budget: ThinkingBudget | None = None
    # None: no log-probabilities; 0: the chosen token's; k: also the k best tokens'.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Report the log-probabilities of these ids at every output token.
    logprob_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    # The name and content hash of a loaded adapter; "" for none.
    adapter: str = ""
    adapter_hash: str = ""
    pooling: Pooling | None = None
    # Times count from the arrival. None: schedule in the order of arrival.
    objective: Objective | None = None
    # When preempted, end as retryable instead of waiting: another shard may have room.
    hand_back: bool = False
    # The address of a shard that may have KV blocks of the prompt and output; "" for none.
    kv_source: str = ""
    # Compute nothing. End when the KV blocks that `kv_source`, host memory and disk have are here.
    only_fetches: bool = False
    # Images in the order of their places in the prompt. Places do not overlap.
    images: tuple[PromptImage, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def num_tokens(self) -> int:
        """Count the tokens of the prompt and of the output that was delivered before."""
        return (len(self.prompt) + len(self.output)) // 4

    @property
    def priority(self) -> int:
        """The request's class: lower runs first."""
        return 0 if self.objective is None else self.objective.priority or 0

    def ends_with(self, token_id: int) -> bool:
        """Tell whether this token ends the sequence."""
        return token_id in self.stop_token_ids or token_id in self.reluctant_stop_ids
