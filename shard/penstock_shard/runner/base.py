"""The seam between the engine loop and whatever computes tokens.

A runner turns a plan of plain integers into sampled tokens. It owns weights, KV memory and the
sampler; it knows nothing of queues, block accounting or the wire. Importing this module must not
import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock_shard.request import Pooling, Request


@dataclass(slots=True)
class ScheduledRequest:
    """A row of a step: compute tokens [start, start + count) of the request.

    When that reaches its last token (`samples`), one more is sampled, at output position
    start + count - `request.num_prompt_tokens`. `request.block_ids` covers at least start + count
    tokens. The last of them may be missing in `request.token_ids`: the step before, which has not
    been collected, samples it. A request with `pooling` gets the vector of its prompt where
    another would get a token. The first `num_prompt_logprobs` of its tokens predict prompt tokens
    whose log-probabilities are wanted.

    With `drafts` the row computes its last known token and these, which are drafts of those that
    follow: after each of them a token is sampled as ever, for as long as what was sampled is what
    was drafted and does not end the sequence. So it gives 1 to `count` tokens, and nothing may be
    launched for its request until it is collected.
    """

    request: Request
    start: int
    count: int
    samples: bool
    num_prompt_logprobs: int = 0
    drafts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one forward pass computes. Rows with `count` 1 that sample come first, then those
    with drafts.
    """

    rows: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of n tokens, in columns.

    `top_*` hold n times `top_n`, best first; `requested` holds n times as many as the request's
    `logprob_token_ids`.
    """

    chosen: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_n: int = 0
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    requested: list[float] = field(default_factory=list)

    @property
    def num_requested(self) -> int:
        """Of each token."""
        return len(self.requested) // max(1, len(self.chosen))

    def first(self, count: int) -> Logprobs:
        """Those of the first `count` tokens."""
        keep = count * self.top_n
        keep_requested = count * self.num_requested
        return Logprobs(
            self.chosen[:count],
            self.ranks[:count],
            self.top_n,
            self.top_token_ids[:keep],
            self.top_logprobs[:keep],
            self.requested[:keep_requested],
        )

    def without_first(self, count: int) -> Logprobs:
        """The same without the first `count` tokens."""
        skip = count * self.top_n
        skip_requested = count * self.num_requested
        return Logprobs(
            self.chosen[count:],
            self.ranks[count:],
            self.top_n,
            self.top_token_ids[skip:],
            self.top_logprobs[skip:],
            self.requested[skip_requested:],
        )

    def extend(self, later: Logprobs) -> None:
        """Append those of the tokens that follow."""
        self.chosen += later.chosen
        self.ranks += later.ranks
        self.top_token_ids += later.top_token_ids
        self.top_logprobs += later.top_logprobs
        self.requested += later.requested


@dataclass(slots=True)
class RowResult:
    """What one row of a step gave.

    `token_id` is None for a row that did not sample. `prompt_logprobs` covers the prompt tokens at
    indices start + 1 .. start + count (bounded by the prompt's end): those that the row's logits
    predict. `error` ends the request (NaN logits, say) and leaves the rest of the step alone;
    `is_callers` where the request asked for what cannot be.

    Of a row with drafts `more_token_ids` are the tokens after that one, and `logprobs` are those of
    all. What would be an error after its first token is none: the next step finds it again.
    """

    token_id: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    error: str | None = None
    is_callers: bool = False
    # The prompt's pooled final hidden states, whole and as they are: float32, little-endian.
    embedding: bytes | None = None
    more_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """How embeddings of a model are meant to be made; `size` is the number of their values."""

    pooling: Pooling
    normalize: bool
    size: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that is loaded. `content_hash` is over its files, `source` as it was named."""

    name: str
    content_hash: str
    source: str
    rank: int


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that fits the model and can be put in place; `weights` are the store's."""

    content_hash: str
    rank: int
    weights: object = None


class AdapterStore(Protocol):
    """Where a runner keeps adapters: under indices from 1 on, which its caller gives out."""

    def read(self, source: str) -> ReadAdapter:
        """Find, read and check an adapter: slow, and in any thread.

        Raises:
            ModelError: one line that says what is wrong with it.
        """

    def place(self, index: int, adapter: ReadAdapter) -> None:
        """Under an index that no request has."""

    def drop(self, index: int) -> None:
        """That of an index which no request has any more."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the runner serves, for GetInfo and for checking requests."""

    architecture: str
    weights_hash: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    # Defaults from the model's generation_config; SamplingParams field names to values.
    default_sampling: dict[str, float]
    block_size: int
    num_blocks: int
    dtype: str
    kv_dtype: str
    device: str
    attention_backend: str
    # Request features this runner honours; see `penstock_shard.validation`.
    capabilities: frozenset[str]
    # Where "embed" is among the capabilities.
    embedding: EmbeddingDefaults | None = None
    batch_invariant: bool = False
    numerics_fingerprint: str = ""
    # How many steps may be launched before the oldest is collected, less one: 1 keeps a device
    # busy while results are handled, 0 takes in each step before the next is scheduled.
    max_steps_ahead: int = 0
    # How long the largest step took when it was tried at load; 0 where none was.
    worst_step_s: float = 0.0
    # Where "adapter" is among the capabilities: those that are loaded.
    adapters: tuple[Adapter, ...] = ()


class StepOutOfMemory(Exception):
    """The device's memory did not hold a step. Nothing of it counts, and what the runner keeps of
    its requests may be as before it or after it, never half-way. The text says what was asked for.

    Steps that were launched before this was raised are void, whatever becomes of them: they are
    collected, may raise this too, and what they give is thrown away. They must fail in no other
    way, though tokens that they need were never sampled. What is launched later runs as ever.
    """


class Runner(Protocol):
    """Computes steps, in the order they were launched."""

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def adapters(self) -> AdapterStore | None:
        """None where no requests with adapters are served."""

    def launch(self, plan: StepPlan) -> None:
        """Hand over the inputs of a step. Returns before the step is over where it can."""

    def collect(self) -> Sequence[RowResult]:
        """Wait for the oldest launched step; one result a row, in the plan's order.

        Raises:
            StepOutOfMemory: that step gave nothing, and is over.
        """

    def release(self, request: Request) -> None:
        """The request is over: drop what is kept for it."""
