"""Requests to shards, and their outputs, as plain dataclasses.

Only token ids: the layer above has text, the layer below tensors.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableSequence, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from penstock_proto.limits import GREEDY_TEMPERATURE, RETENTION_RANGES, out_of_bounds

# Numbers that came over the wire were rounded to 32 bits.
_ROUNDING = 1e-6


def random_seed() -> int:
    """A seed for a request whose user gave none, so that any shard can continue it."""
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling. None means the shard's default (the model's own configuration).

    `temperature` below 1e-5 is greedy; `top_k` 0 or -1 turns it off; `seed` is 64 bits, unsigned.
    `penalty_window_tokens`: the number of previous tokens, of prompt and output, to which the three
    penalties apply; 0 turns them off, None means all.
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


class ConstraintKind(enum.StrEnum):
    """Languages that can constrain an output."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"

    def __repr__(self) -> str:
        return repr(self.value)


CONSTRAINT_KINDS = frozenset[str](ConstraintKind)


@dataclass(frozen=True, slots=True)
class Constraint:
    """Restricts the output's text. `kind` is a `ConstraintKind` or its value; `value` is empty for
    JSON_OBJECT, and `options` is for CHOICE.
    """

    kind: str
    value: str = ""
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises `ValueError` for a kind that is none."""
        object.__setattr__(self, "kind", ConstraintKind(self.kind))
        # Equal constraints are compiled once: a constraint is a key.
        object.__setattr__(self, "options", tuple(self.options))


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A bound of `max_tokens` tokens between the token that begins reasoning and the token that
    ends it. At the bound, the end token is forced. `begun`: the prompt ends within reasoning.
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
    """An image in a prompt: its digest in hexadecimal (`image_digest`), its size, and its
    placeholder tokens in the prompt.
    """

    sha256: str
    width: int
    height: int
    offset: int
    num_tokens: int

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


# Provides the pixels of an image, RGB8 in rows, if a shard lacks them.
PixelSource = Callable[[PromptImage], Awaitable[bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A sequence to generate.

    `output_token_ids` were generated and delivered before: generation continues after them, and
    `max_tokens` and `min_tokens` count them. `logprobs`: None reports none, 0 the sampled token's,
    k also the k best; `prompt_logprobs` likewise for the prompt.
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
    # request only to shards with this tokenizer. Empty: any.
    tokenizer_hash: str = ""
    # Continue only at shards with the same numerics, which give the same tokens; otherwise a fleet
    # waits, or gives up.
    exact: bool = False
    # Numerics fingerprint of shards that may serve the request. Empty: any.
    numerics: str = ""
    # Requests of one session should go to the same shard, for its prefix cache; the policy decides.
    session: str = ""
    # The address of the only shard that may serve the request. Empty: any.
    shard: str = ""
    # The name of a LoRA adapter, and the hash of its content. A fleet sets the hash when it chooses
    # a shard, so that the request never continues with another adapter of the same name.
    adapter: str = ""
    adapter_hash: str = ""
    cache_salt: str = ""
    label: str = ""
    traceparent: str = ""
    # The name of the API key, for an audit log. Not sent to shards.
    key_name: str = ""
    # An opaque name of this client's user. Shards have users take turns.
    caller: str = ""
    # Images in the order of their places. Their pixels must be put before, as a fleet does.
    images: Sequence[PromptImage] = ()

    @property
    def priority(self) -> int:
        """The request's class: lower runs first."""
        return self.objective.priority or 0


@dataclass(frozen=True, slots=True)
class Retain:
    """A hint for an ended request: its KV blocks should stay for `seconds`. `expected_s`: seconds
    until the likely next turn; None: unknown. `priority`: from 0 to 100, for when room is short;
    None: the middle.
    """

    seconds: float
    expected_s: float | None = None
    priority: int | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for a field out of its bounds."""
        for name, allowed in RETENTION_RANGES.items():
            value = getattr(self, name)
            if value is not None and not allowed.holds(value):
                raise ValueError(out_of_bounds(name, value, allowed))


class Pooling(enum.StrEnum):
    """Ways in which the hidden states of a prompt become one vector."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Prompts for which vectors are computed.

    `pooling` ("last" token or "mean" of all) and `normalize` (scale to length 1) default to the
    model's own if None; `dimensions`: the number of first values of each vector that are kept.
    """

    inputs: Sequence[Sequence[int]]
    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    model: str = ""
    # See `GenerationRequest`.
    tokenizer_hash: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a request. A higher number ends a lower one and takes over.

    `instance_id`: the engine it is for ("" is any). `hand_back`: the shard hands the request back
    when its KV blocks run out. `suspect`: it was running in two engines that died. `kv_source`: the
    address of a shard that may have its KV blocks ("" is none).
    """

    number: int = 0
    instance_id: str = ""
    hand_back: bool = False
    suspect: bool = False
    kv_source: str = ""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as it is sent to a shard. `number` stands for the attempt in responses that have
    one token of each attempt; 0: none.
    """

    request_id: str
    request: GenerationRequest
    attempt: Attempt = Attempt()
    number: int = 0


@dataclass(slots=True, eq=False)
class AttemptRecord:
    """The outcome of an attempt at a request. Times are `time.perf_counter`'s; None: not yet."""

    shard: str
    # The policy's reason for this shard.
    reason: str
    sent_s: float
    first_output_s: float | None = None
    ended_s: float | None = None
    # The reason why the request moved or failed; "" if it ended normally.
    ended_because: str = ""
    # The id of the attempt's span, the parent of the shard's, if attempts are traced.
    span_id: str = ""
    # Prompt and earlier output: the number of tokens, the number that the shard found cached, and
    # another shard that may have had their KV blocks ("" is none).
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

    `top_token_ids` and `top_logprobs` have n times `top_n` entries, row after row, best first;
    large ones are arrays of numbers. `requested` has n times as many as the request's
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
        """Wire bytes of the columns that have several entries per token."""
        return 8 * len(self.top_token_ids) + 4 * len(self.requested)

    def extend(self, other: Logprobs) -> None:
        """Append rows with the same columns."""
        self.chosen += other.chosen
        self.ranks += other.ranks
        self.top_n = other.top_n
        self.top_token_ids += other.top_token_ids
        self.top_logprobs += other.top_logprobs
        self.requested += other.requested

    def first(self, count: int) -> Logprobs:
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
        requested_n = len(self.requested) // len(self.chosen) if self.chosen else 0
        del self.chosen[:count], self.ranks[:count]
        del self.top_token_ids[: count * self.top_n], self.top_logprobs[: count * self.top_n]
        del self.requested[: count * requested_n]


@dataclass(slots=True)
class Output:
    """New tokens and other results of a request. Only the last output has a `finish_reason`.

    `first_position` counts from the request's first output token. `prompt_logprobs` covers the
    prompt from index `prompt_logprobs_start` (the token at index 0 has none). A failed request
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
        """Approximate wire bytes of the output's log-probabilities."""
        if self.logprobs is None and self.prompt_logprobs is None:
            return 0
        return sum(each.num_bytes for each in (self.logprobs, self.prompt_logprobs) if each)

    def take_first(self, count: int) -> Output:
        """Split off the first `count` tokens (not all), and everything that precedes them."""
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
        """Append the next output, for a slow reader."""
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
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """A model's defaults for embeddings; `size` is the length of a whole vector."""

    pooling: Pooling
    normalize: bool
    size: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a shard has loaded; `source` is the argument of `load_adapter`."""

    name: str
    content_hash: str
    source: str
    rank: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of a model according to its files; 0 or empty if unknown."""

    # The type in config.json, such as "llama".
    model_type: str = ""
    num_parameters: int = 0
    # Bytes of the stored weights.
    weight_bytes: int = 0
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    # Heads of keys and values.
    num_kv_heads: int = 0


def _size_of(value: Any) -> float:
    return len(value) if isinstance(value, Sized) else float(value)


@dataclass(frozen=True, slots=True)
class FieldBound:
    """Bound of what an engine honours of a field, where that is less than the wire allows: a
    number's least value beside 0 and its most, or the most entries of a list.
    """

    field: str
    most: float
    least: float = 0.0

    def holds(self, value: object) -> bool:
        """Tell whether the engine takes this value of the field."""
        size = _size_of(value)
        if size < GREEDY_TEMPERATURE:
            return True
        return self.least * (1 - _ROUNDING) <= size <= self.most * (1 + _ROUNDING)

    def __str__(self) -> str:
        return f"0, or {self.least:g} to {self.most:g}" if self.least else f"at most {self.most:g}"


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
    # Bytes of keys and values of a token, and of a sequence of `max_model_len` tokens; and the
    # number of such sequences that fit. 0 if unknown.
    kv_bytes_per_token: int = 0
    kv_bytes_per_sequence: int = 0
    kv_sequences: int = 0
    # For layers with states: bytes of one sequence's states, and the number of states that fit.
    state_bytes: int = 0
    num_states: int = 0
    # The work that the shard should get: "prefill", "decode" (if other shards do the rest), "both".
    role: str = "both"
    shape: ModelShape = ModelShape()
    # Bounds of some capabilities; and capabilities that the shard lacks for requests with
    # `output_token_ids`.
    bounds: tuple[FieldBound, ...] = ()
    uncontinued: frozenset[str] = frozenset()

    def has_adapter(self, name: str, content_hash: str = "") -> bool:
        """True if the adapter of this name is loaded, with this content ("" is any). The name ""
        means the base model, which is always loaded.
        """
        adapter = self.adapters.get(name)
        return not name or (adapter is not None and content_hash in ("", adapter.content_hash))

    def adapter_hash(self, name: str) -> str:
        """The hash of an adapter's content; "" if the adapter is not loaded."""
        adapter = self.adapters.get(name)
        return "" if adapter is None else adapter.content_hash


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """Requests of one class at a shard, and prompt tokens of requests without an output yet."""

    priority: int
    running: int = 0
    waiting: int = 0
    queued_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load that a shard last reported."""

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
    # Sums over all steps of the engine: seconds, and computed tokens.
    steps_seconds_total: float = 0.0
    computed_tokens_total: int = 0
    # Increases whenever the set of loaded adapters changes.
    adapters_revision: int = 0
    # KV blocks with copies in memory and on disk; and all blocks that the engine has copied back,
    # fetched from other shards, and exported.
    copied_blocks: int = 0
    disk_blocks: int = 0
    loaded_blocks_total: int = 0
    fetched_blocks_total: int = 0
    exported_blocks_total: int = 0
    # Empty if all requests have the default priority, and from shards of older releases.
    classes: tuple[ClassLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksReport:
    """Pieces of prefixes that a shard holds, or no longer holds: names by `Tier`. A snapshot has
    all reports from the one that begins it to the one that ends it.
    """

    pieces: Mapping[int, Sequence[int]]
    instance_id: str = ""
    snapshot_begins: bool = False
    snapshot_ends: bool = False


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """Remaining work of a draining shard."""

    running: int
    waiting: int
