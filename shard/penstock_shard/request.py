"""A request as the engine sees it: token ids, parameters, progress. No torch, no wire, no text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class FinishReason(enum.Enum):
    """Why a sequence ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class Pooling(enum.Enum):
    """How the hidden states of a prompt become one vector."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens of one request are drawn; complete, after the model's defaults were filled in.

    The defaults below change nothing. `temperature` 0 is greedy: `top_k`, `top_p`, `min_p`,
    `typical_p` and `seed` do not matter then. `seed` has 64 bits. What each field does, and in
    which order, is said in `penstock_shard.runner.sampler`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    # Empty: every id.
    allowed_token_ids: tuple[int, ...] = ()
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # (id, what is added to its logit); each id at most once.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Sequences of ids that the output must not contain.
    bad_words: tuple[tuple[int, ...], ...] = ()


# The languages of constraints, as the wire's Constraint names them.
CONSTRAINT_KINDS = frozenset(
    {"json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"}
)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output's text must match: `value` in the language `kind` (a field of the wire's
    Constraint); a choice has `options` instead.
    """

    kind: str
    value: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    """Processor time and memory that compiling one constraint may take."""

    timeout_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most `max_tokens` between the token that begins reasoning and the one that ends it; after
    that many the end token is forced. `begun`: the prompt ends within reasoning.
    """

    max_tokens: int
    begin_token_id: int
    end_token_id: int
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Objective:
    """What the scheduler should aim for. Lower `priority` runs first. `deadline_s` and
    `time_to_first_token_s` count from the request's arrival. None: no such objective.
    """

    priority: int = 0
    deadline_s: float | None = None
    time_to_first_token_s: float | None = None
    seconds_between_tokens: float | None = None
    latency_sensitive: bool = False


NO_OBJECTIVE = Objective()


class RequestState(enum.Enum):
    """Whether the scheduler has a request queued, running or ended."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: what is known of it, and how much of that is computed into the KV cache.

    There is no prefill phase and no decode phase: each step computes some tokens that are known,
    and a step that reaches the last known token samples one more. Steps overlap, so counts run
    ahead of values: `token_ids` (the prompt, then the output so far) holds what has come back,
    `num_pending` counts tokens that launched steps will sample after those, and `num_computed`
    tokens have been handed to steps; their keys and values are, or are about to be, in `block_ids`.

    With `pooling` it is an embedding request: `max_tokens` is 1, and the prompt's vector comes back
    in place of that token.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int
    # Output tokens that were delivered before this attempt began; never sent again.
    num_delivered: int
    sampling: SamplingParams
    # Bound on the output tokens, those delivered by earlier attempts included.
    max_tokens: int
    # Ids that end the sequence: the request's own and, unless ignored, the model's eos ids.
    stop_token_ids: frozenset[int]
    # While the output (delivered tokens included) is shorter, no stop token is drawn.
    min_tokens: int = 0
    # Ids that end the sequence where its constraint leaves nothing else to draw.
    reluctant_stop_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    # The constraint's matcher, once it is compiled, advanced past the delivered tokens.
    matcher: LLMatcher | None = None
    thinking_budget: ThinkingBudget | None = None
    # None: no log-probabilities; 0: the chosen token's; k: the k best besides.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Ids whose log-probabilities are reported at every output token.
    logprob_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    # The adapter's content hash and its index in the runner; "" and 0 without an adapter.
    adapter: str = ""
    adapter_index: int = 0
    pooling: Pooling | None = None
    objective: Objective = NO_OBJECTIVE
    # When preempted, end as retryable instead of waiting: another shard may have room.
    hand_back: bool = False
    # Order and time of arrival; a request that is preempted keeps its own.
    arrival: int = 0
    arrived_s: float = 0.0

    state: RequestState = RequestState.WAITING
    num_pending: int = 0
    num_computed: int = 0
    # Launched steps that have a row of this request and are not collected. Until they are, its
    # blocks stay its own, whatever becomes of it.
    num_steps_in_flight: int = 0
    # When its last token came back.
    last_token_s: float = 0.0
    block_ids: list[int] = field(default_factory=list)
    # Chained hashes of the full blocks of `token_ids`, as far as they were needed.
    block_hashes: list[bytes] = field(default_factory=list)
    # How many of `block_ids` are cached under their hashes, or were found there.
    num_cached_blocks: int = 0
    # Serial of the last cached one, or the root hash before the first; see `kv_blocks`.
    cached_serial: int | bytes = b""
    # Tokens found in the prefix cache when the request was first scheduled; None before.
    cached_tokens: int | None = None
    # Prompt tokens whose log-probabilities have been sent; the first token has none.
    num_prompt_logprobs_sent: int = 0
    preemptions: int = 0
    # Steps that computed a chunk of it and sampled nothing.
    num_partial_steps: int = 0
    # Output tokens that took no step of their own, because drafts were accepted.
    num_accepted_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that have come back."""
        return len(self.token_ids) - self.num_prompt_tokens

    def ends_with(self, token_id: int) -> bool:
        """Whether this token ends the sequence."""
        return token_id in self.stop_token_ids or token_id in self.reluctant_stop_ids

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Some are still to be sent, so the prompt must be computed, not taken from the cache."""
        if self.prompt_logprobs is None:
            return False
        return self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every prompt token must be computed, so that the prefix cache is not used."""
        return self.needs_prompt_logprobs or self.pooling is Pooling.MEAN
