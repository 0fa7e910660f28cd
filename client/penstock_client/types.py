"""Requests to shards, and their outputs, as plain dataclasses.

Token ids only: text is above this layer, tensors below.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field


def random_seed() -> int:
    """A seed for a request whose user gave none, so that any shard can go on with it."""
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of drawing a token. None is the shard's default (the model's own configuration).

    `temperature` below 1e-5 is greedy; `top_k` 0 or -1 turns it off; `seed` is 64 bits, unsigned.
    `penalty_window_tokens` is how many tokens before the one that is drawn the three penalties look
    at, of prompt and output: 0 turns them off, None means all.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] = ()
    penalty_window_tokens: int | None = None


class ConstraintKind(enum.Enum):
    """The languages an output can be constrained by."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """Restricts the output's text; `value` is empty for JSON_OBJECT, `options` serves CHOICE."""

    kind: ConstraintKind
    value: str = ""
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A bound of `max_tokens` between the token that begins reasoning and the one that ends it,
    which is forced then. `begun`: the prompt ends within reasoning.
    """

    max_tokens: int
    begin_token_id: int
    end_token_id: int
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Objective:
    """Aims for the scheduler. Lower `priority` runs first."""

    priority: int | None = None
    deadline_s: float | None = None
    time_to_first_token_s: float | None = None
    seconds_between_tokens: float | None = None
    latency_sensitive: bool | None = None


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: the digest of it in hexadecimal (`image_digest`), its size, and
    which of the prompt's tokens stand for it.
    """

    sha256: str
    width: int
    height: int
    offset: int
    num_tokens: int

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


# Gives the pixels of an image, RGB8 in rows, whenever a shard lacks them.
PixelSource = Callable[[PromptImage], Awaitable[bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A sequence to generate.

    `output_token_ids` are tokens that were generated and delivered before: generation goes on
    after them, and `max_tokens` and `min_tokens` count them. `logprobs` None reports none, 0 the
    chosen token's, k the k best besides; `prompt_logprobs` likewise for the prompt.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    constraint: Constraint | None = None
    thinking_budget: ThinkingBudget | None = None
    objective: Objective = Objective()
    model: str = ""
    # The hash of the tokenizer that made the ids (`ShardInfo.tokenizer_hash`): a fleet sends the
    # request only to shards with the same one. Empty: any.
    tokenizer_hash: str = ""
    # Continue only at shards with the same numerics, which give the same tokens; otherwise a fleet
    # waits, or gives up.
    exact: bool = False
    # Only shards with this numerics fingerprint. Empty: any.
    numerics: str = ""
    # Requests of one session should go to the same shard, for its prefix cache; how far they do is
    # up to the policy.
    session: str = ""
    # The address of the only shard of the fleet that may serve it. Empty: any.
    shard: str = ""
    # The name of a LoRA adapter, and the hash of its content; a fleet fills in the hash when it has
    # chosen a shard, so that a request never goes on with another adapter of the same name.
    adapter: str = ""
    adapter_hash: str = ""
    cache_salt: str = ""
    label: str = ""
    traceparent: str = ""
    # The name of the API key that asked for it, for an audit log. Shards are not told.
    key_name: str = ""
    # Who of those that share this client it is for: an opaque name. Shards have them take turns.
    caller: str = ""
    # In the order of their places. Whoever sends it must put their pixels first, as a fleet does.
    images: Sequence[PromptImage] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Prompts to compute vectors of.

    `pooling` ("last" token or "mean" of all) and `normalize` (scale to length 1) default to the
    model's own if None; `dimensions` is how many first values of each vector are kept.
    """

    inputs: Sequence[Sequence[int]]
    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    model: str = ""
    # As in `GenerationRequest`.
    tokenizer_hash: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a request. A higher number ends a lower one and takes over.

    `instance_id` names the engine it is for ("" is any); `hand_back` asks the shard to hand the
    request back when its KV blocks run out; a `suspect` was running in two engines that died;
    `kv_source` is the address of a shard that may have KV blocks of it ("" is none).
    """

    number: int = 0
    instance_id: str = ""
    hand_back: bool = False
    suspect: bool = False
    kv_source: str = ""


@dataclass(slots=True, eq=False)
class AttemptRecord:
    """The outcome of an attempt at a request. Times are `time.perf_counter`'s; None: not yet."""

    shard: str
    # Why this shard was chosen: the policy's reason.
    reason: str
    sent_s: float
    first_output_s: float | None = None
    ended_s: float | None = None
    # Why the request went on elsewhere, or failed there; "" if it ended normally.
    ended_because: str = ""
    # The parent id of the shard's span, if attempts are traced.
    span_id: str = ""
    # Of the prompt and the output before it: how many tokens there were, how many of them the shard
    # found cached, and which other shard it could ask for their KV blocks ("" is none).
    num_tokens: int = 0
    cached_tokens: int | None = None
    kv_source: str = ""


class FinishReason(enum.Enum):
    """The reason why a sequence ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of n tokens, in columns.

    `top_token_ids` and `top_logprobs` hold n times `top_n` entries, row after row, best first; they
    are arrays of numbers where there are many. `requested` holds n times as many as the request's
    `logprob_token_ids`.
    """

    chosen: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_n: int = 0
    top_token_ids: MutableSequence[int] = field(default_factory=list)
    top_logprobs: MutableSequence[float] = field(default_factory=list)
    requested: list[float] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes that the columns of several entries take on the wire."""
        return 8 * len(self.top_token_ids) + 4 * len(self.requested)

    def extend(self, other: Logprobs) -> None:
        """Append the rows of `other`, which must report the same columns."""
        self.chosen += other.chosen
        self.ranks += other.ranks
        self.top_n = other.top_n
        self.top_token_ids += other.top_token_ids
        self.top_logprobs += other.top_logprobs
        self.requested += other.requested

    def first(self, count: int) -> Logprobs:
        """The first `count` rows."""
        requested_n = len(self.requested) // len(self.chosen) if self.chosen else 0
        return Logprobs(
            chosen=self.chosen[:count],
            ranks=self.ranks[:count],
            top_n=self.top_n,
            top_token_ids=self.top_token_ids[: count * self.top_n],
            top_logprobs=self.top_logprobs[: count * self.top_n],
            requested=self.requested[: count * requested_n],
        )

    def drop_first(self, count: int) -> None:
        """Remove the first `count` rows."""
        requested_n = len(self.requested) // len(self.chosen) if self.chosen else 0
        del self.chosen[:count], self.ranks[:count]
        del self.top_token_ids[: count * self.top_n], self.top_logprobs[: count * self.top_n]
        del self.requested[: count * requested_n]


@dataclass(slots=True)
class Output:
    """News of a request. Only the last output of a request has a `finish_reason`.

    `first_position` counts from the request's first output token. `prompt_logprobs` covers the
    prompt from index `prompt_logprobs_start` (the token at index 0 has none). A request that fails
    raises a `PenstockError` instead of giving a last output.
    """

    token_ids: list[int]
    first_position: int
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    prompt_logprobs_start: int = 1
    cached_tokens: int | None = None
    # From arrival at the shard to the first step, in seconds; on the first output of an attempt.
    queue_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    @property
    def scores_bytes(self) -> int:
        """Bytes of its log-probabilities on the wire, about."""
        if self.logprobs is None and self.prompt_logprobs is None:
            return 0
        return sum(each.num_bytes for each in (self.logprobs, self.prompt_logprobs) if each)

    def take_first(self, count: int) -> Output:
        """Take off the first `count` tokens, which are not all, and what comes before them."""
        first = Output(self.token_ids[:count], self.first_position)
        first.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        first.prompt_logprobs_start = self.prompt_logprobs_start
        first.cached_tokens, self.cached_tokens = self.cached_tokens, None
        first.queue_s, self.queue_s = self.queue_s, None
        del self.token_ids[:count]
        self.first_position += count
        if self.logprobs is not None:
            first.logprobs = self.logprobs.first(count)
            self.logprobs.drop_first(count)
        return first

    def merge(self, later: Output) -> None:
        """Append the output that came next, for a reader that was behind."""
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = later.logprobs
            else:
                self.logprobs.extend(later.logprobs)
        if later.prompt_logprobs is not None:
            if self.prompt_logprobs is None:
                self.prompt_logprobs = later.prompt_logprobs
                self.prompt_logprobs_start = later.prompt_logprobs_start
            else:
                self.prompt_logprobs.extend(later.prompt_logprobs)
        if self.cached_tokens is None:
            self.cached_tokens = later.cached_tokens
        if self.queue_s is None:
            self.queue_s = later.queue_s
        self.finish_reason = later.finish_reason
        self.stop_token_id = later.stop_token_id


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """The bounds a shard enforces."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """A model's defaults for embeddings; `pooling` is "last" or "mean", `size` the number of values
    of a whole vector.
    """

    pooling: str
    normalize: bool
    size: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a shard has loaded; `source` is what `load_adapter` was given."""

    name: str
    content_hash: str
    source: str
    rank: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of a model as its files say it; 0 or empty where they do not."""

    # As config.json names its kind, such as "llama".
    model_type: str = ""
    num_parameters: int = 0
    # Of the weights, as they are stored.
    weight_bytes: int = 0
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    # Of keys and values.
    num_kv_heads: int = 0


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard's model and how it is served. `instance_id` is new at each start of its engine."""

    address: str
    schema_revision: int
    min_schema_revision: int
    version: str
    instance_id: str
    model: str
    model_aliases: tuple[str, ...]
    revision: str
    architecture: str
    weights_hash: str
    tokenizer_hash: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    block_size: int
    num_blocks: int
    limits: ShardLimits
    dtype: str
    kv_dtype: str
    device: str
    attention_backend: str
    capabilities: frozenset[str]
    batch_invariant: bool
    numerics_fingerprint: str
    # Loaded adapters, by name.
    adapters: Mapping[str, Adapter]
    # None if "embed" is not among the capabilities.
    embedding: EmbeddingDefaults | None = None
    # Bytes of keys and values: of a token, of a sequence of `max_model_len`; and how many such
    # sequences there is room for. 0 where that is not known.
    kv_bytes_per_token: int = 0
    kv_bytes_per_sequence: int = 0
    kv_sequences: int = 0
    # Where layers have states: bytes of one sequence's, and how many there is room for.
    state_bytes: int = 0
    num_states: int = 0
    # "prefill" or "decode": what it should be sent if others are there for the rest.
    role: str = "both"
    shape: ModelShape = ModelShape()

    def has_adapter(self, name: str, content_hash: str = "") -> bool:
        """Tell whether the adapter of this name is loaded, with this content ("" is any). The name
        "" is the base model, which is always there.
        """
        adapter = self.adapters.get(name)
        return not name or (adapter is not None and content_hash in ("", adapter.content_hash))

    def adapter_hash(self, name: str) -> str:
        """The hash of the content of the adapter of this name; "" if it is not loaded."""
        adapter = self.adapters.get(name)
        return "" if adapter is None else adapter.content_hash


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load of a shard, as it last reported."""

    instance_id: str = ""
    running: int = 0
    waiting: int = 0
    queued_prompt_tokens: int = 0
    running_tokens: int = 0
    referenced_blocks: int = 0
    num_blocks: int = 0
    steps_total: int = 0
    step_running_s: float = 0.0
    engine_beat_age_s: float = 0.0
    preemptions_total: int = 0
    serving: bool = False
    draining: bool = False
    handing_over: bool = False
    # Over all steps of the engine: the seconds they took, and the tokens they computed.
    steps_seconds_total: float = 0.0
    computed_tokens_total: int = 0
    # Increases whenever the set of loaded adapters changes.
    adapters_revision: int = 0
    # KV blocks of which memory and disk have copies; and over the life of the engine those copied
    # back, those that came from other shards, and those that went there.
    copied_blocks: int = 0
    disk_blocks: int = 0
    loaded_blocks_total: int = 0
    fetched_blocks_total: int = 0
    exported_blocks_total: int = 0


@dataclass(frozen=True, slots=True)
class BlocksReport:
    """Pieces of prefixes that a shard holds, or no longer does: names by `Tier`. All that it holds
    is in the reports from one that begins a snapshot to one that ends it.
    """

    pieces: Mapping[int, Sequence[int]]
    instance_id: str = ""
    snapshot_begins: bool = False
    snapshot_ends: bool = False


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The work that a draining shard has left."""

    running: int
    waiting: int
