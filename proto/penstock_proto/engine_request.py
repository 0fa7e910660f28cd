"""A request as an engine takes it: checked, and complete. A token depends on nothing else.

A shard's server makes it of a `GenerationRequest`, whose absent fields mean the model's defaults.
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
    # Bound on the output tokens, those of `output` included.
    max_tokens: int
    # While the output (`output` included) is shorter, no stop token is drawn.
    min_tokens: int = 0
    # Ids that end the sequence: the request's own and, unless ignored, the model's eos ids.
    stop_token_ids: frozenset[int] = frozenset()
    # Ids that end the sequence where its constraint leaves nothing else to draw.
    reluctant_stop_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    thinking_budget: ThinkingBudget | None = None
    # None: no log-probabilities; 0: the chosen token's; k: the k best besides.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Ids whose log-probabilities are reported at every output token.
    logprob_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    # Name and content hash of an adapter that the engine has; "" for none.
    adapter: str = ""
    adapter_hash: str = ""
    pooling: Pooling | None = None
    # Times count from the arrival. None: nothing but the order of arrival.
    objective: Objective | None = None
    # When preempted, end as retryable instead of waiting: another shard may have room.
    hand_back: bool = False
    # Address of a shard that may have KV blocks of its prompt and output; empty for none.
    kv_source: str = ""
    # Nothing is computed: it ends when what `kv_source`, host memory and disk have of it is here.
    only_fetches: bool = False
    # In the order of their places in the prompt, which do not overlap.
    images: tuple[PromptImage, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output that was delivered before."""
        return (len(self.prompt) + len(self.output)) // 4

    @property
    def priority(self) -> int:
        """Lower ones run first."""
        return 0 if self.objective is None else self.objective.priority or 0

    def ends_with(self, token_id: int) -> bool:
        """Tell whether this token ends the sequence."""
        return token_id in self.stop_token_ids or token_id in self.reluctant_stop_ids
