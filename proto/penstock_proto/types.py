"""Requests to shards, and their outputs, as plain dataclasses.

Only token ids: the layer above has text, the layer below tensors.
"""

from __future__ import annotations

import enum
import secrets
import sys
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from penstock_proto.errors import Code
from penstock_proto.limits import RETENTION_RANGES, out_of_bounds

# Bytes of an id, and of a log-probability.
_ITEM_BYTES = 4


def random_seed() -> int:
    """A seed for a request whose user gave none, so that any shard can continue it."""
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class SamplingNumbers:
    """Parameters of sampling that are a number each, which HTTP bodies and shards call the same.
    None means the shard's default (the model's own configuration).

    `temperature` below 1e-5 is greedy; `top_k` 0 or -1 turns it off.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


SAMPLING_NUMBERS = tuple(each.name for each in fields(SamplingNumbers))


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingNumbers):
    """Parameters of sampling, complete. `seed` is 64 bits, unsigned; None: the shard chooses.

    `penalty_window_tokens`: the number of previous tokens, of prompt and output, to which the three
    penalties apply; 0 turns them off, None means all.
    """

    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] = ()
    penalty_window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineSampling:
    """The sampling of one request as an engine takes it: complete, with the model's defaults.

    These defaults change nothing. `temperature` 0 is greedy: then `top_k`, `top_p`, `min_p`,
    `typical_p` and `seed` do not matter. `seed` has 64 bits. `allowed_token_ids`: () allows every
    id. `logit_bias` has pairs of an id and what is added to its logit, each id at most once.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
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
    address of a shard that may have its KV blocks ("" is none). `left_s`: the seconds that are left
    of the deadline (None is what the request says). `traceparent`: the trace context of the attempt
    ("" is the request's).
    """

    number: int = 0
    instance_id: str = ""
    hand_back: bool = False
    suspect: bool = False
    kv_source: str = ""
    left_s: float | None = None
    traceparent: str = ""


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
    # Between engine and server only: a request that fetches KV blocks gets no more of them.
    FETCHED = "fetched"


class Logprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of n tokens, in columns.

    The `best_` columns have `top_n` values for each token, best first. They are bytes, as on the
    wire, because there may be as many values as the vocabulary has tokens. `requested` has a value
    for each of the request's `logprob_token_ids` for each token.
    """

    chosen: list[float] = []
    ranks: list[int] = []
    top_n: int = 0
    # Unsigned 32-bit integers and float32, little-endian.
    best_ids: bytearray = msgspec.field(default_factory=bytearray)
    best_logprobs: bytearray = msgspec.field(default_factory=bytearray)
    requested: list[float] = []

    @property
    def top_token_ids(self) -> list[int]:
        """Copy `best_ids` as integers. `best` reads one token's."""
        return numbers_of("I", self.best_ids).tolist()

    @property
    def top_logprobs(self) -> list[float]:
        """Copy `best_logprobs` as floats."""
        return numbers_of("f", self.best_logprobs).tolist()

    def best(self, index: int) -> tuple[array[int], array[float]]:
        """The ids that are most likely at a token, and their log-probabilities."""
        row = slice(index * self.top_n * _ITEM_BYTES, (index + 1) * self.top_n * _ITEM_BYTES)
        return numbers_of("I", self.best_ids[row]), numbers_of("f", self.best_logprobs[row])

    def add_best(self, token_ids: Iterable[int], logprobs: Iterable[float]) -> None:
        """Append the best of the tokens that follow."""
        self.best_ids += bytes_of("I", token_ids)
        self.best_logprobs += bytes_of("f", logprobs)

    @property
    def num_requested(self) -> int:
        """Values in `requested` for each token."""
        return len(self.requested) // max(1, len(self.chosen))

    @property
    def num_bytes(self) -> int:
        """Wire bytes of the columns that have several values for each token."""
        return len(self.best_ids) + len(self.best_logprobs) + _ITEM_BYTES * len(self.requested)

    def extend(self, later: Logprobs) -> None:
        """Append the log-probabilities of the tokens that follow, in the same columns."""
        self.chosen += later.chosen
        self.ranks += later.ranks
        self.top_n = later.top_n or self.top_n
        self.best_ids += later.best_ids
        self.best_logprobs += later.best_logprobs
        self.requested += later.requested

    def first(self, count: int) -> Logprobs:
        """Copy the log-probabilities of the first `count` tokens."""
        best_bytes = count * self.top_n * _ITEM_BYTES
        return Logprobs(
            self.chosen[:count],
            self.ranks[:count],
            self.top_n,
            self.best_ids[:best_bytes],
            self.best_logprobs[:best_bytes],
            self.requested[: count * self.num_requested],
        )

    def drop_first(self, count: int) -> None:
        """Remove the log-probabilities of the first `count` tokens."""
        best_bytes, num_requested = count * self.top_n * _ITEM_BYTES, count * self.num_requested
        del self.chosen[:count], self.ranks[:count], self.requested[:num_requested]
        del self.best_ids[:best_bytes], self.best_logprobs[:best_bytes]


def numbers_of(typecode: str, data: bytes | bytearray) -> array[Any]:
    """Little-endian bytes as an array of "I" or "f"."""
    numbers = array(typecode)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def bytes_of(typecode: str, numbers: Iterable[float]) -> bytes:
    """Numbers as little-endian bytes of "I" or "f"."""
    packed = array(typecode, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class Output(msgspec.Struct, array_like=True):
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
        self.logprobs = _merged(self.logprobs, later.logprobs)
        if self.prompt_logprobs is None:
            self.prompt_logprobs_start = later.prompt_logprobs_start
        self.prompt_logprobs = _merged(self.prompt_logprobs, later.prompt_logprobs)
        if self.cached_tokens is None:
            self.cached_tokens = later.cached_tokens
        if self.queue_s is None:
            self.queue_s = later.queue_s
        self.finish_reason = later.finish_reason
        self.stop_token_id = later.stop_token_id


def _merged(first: Logprobs | None, later: Logprobs | None) -> Logprobs | None:
    if first is None or later is None:
        return first or later
    first.extend(later)
    return first


class Error(msgspec.Struct, array_like=True):
    """The way one request failed."""

    code: Code
    message: str
    field: str = ""
    value: str = ""
    bound: str = ""
    engine_died: bool = False


class Work(msgspec.Struct, array_like=True, frozen=True):
    """The cost of a request to the engine: steps that computed it, and its preemptions."""

    steps: int
    preemptions: int


class RequestOutput(Output, array_like=True, kw_only=True):
    """An output of one of many requests, as shards exchange it: with its attempt, and with the
    error that ended it. Its last output has either a `finish_reason` or an `error`.
    """

    request_id: str
    attempt: int
    error: Error | None = None
    # The vector of a request with `pooling`, on its last output: float32, little-endian.
    embedding: bytes | None = None
    # On the last output, if the engine made it.
    work: Work | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def merge(self, later: RequestOutput) -> None:  # type: ignore[override]
        """Append a later output of the same attempt."""
        Output.merge(self, later)
        self.error = later.error
        self.embedding = later.embedding
        self.work = later.work


class PrefixNames(msgspec.Struct, array_like=True, frozen=True):
    """A prefix block by block: the chained hash of no tokens, then that up to the end of each
    block, and the tokens of all blocks, unsigned 32-bit little-endian.
    """

    root: bytes
    digests: list[bytes]
    token_ids: bytes

    def first(self, count: int) -> PrefixNames:
        """Return the names of the first `count` blocks."""
        if count >= len(self.digests):
            return self
        num_bytes = len(self.token_ids) // len(self.digests) * count
        return PrefixNames(self.root, self.digests[:count], self.token_ids[:num_bytes])
