"""Checks a request against what the shard serves, and fills in the model's defaults.

Pure functions of an incoming request, `RunnerInfo` and configuration. They return a `Request` or
raise a `Refusal`.
"""

from __future__ import annotations

import hashlib
from collections import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_common.request_bounds import (
    GREEDY_TEMPERATURE,
    MAX_BAD_WORD_TOKENS,
    MAX_CHOICE_OPTIONS,
)
from penstock_proto.features import Asked
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.codes import Code
from penstock_shard.ipc.messages import Error
from penstock_shard.ipc.request import (
    Constraint,
    Objective,
    PlacedImage,
    Pooling,
    Request,
    SamplingParams,
    ThinkingBudget,
)
from penstock_shard.ipc.runner_info import Adapter, RunnerInfo
from penstock_shard.ipc.sampling_ranges import SAMPLING_RANGES, Range, out_of_bounds, short

TokenIds = npt.NDArray[np.uint32]

# Bounds of one Embed call. Callers split larger ones.
MAX_EMBEDDING_INPUTS = 1024
_MAX_EMBEDDING_BYTES = 32 * 2**20

MAX_ID_CHARACTERS = 256
_MAX_STOP_TOKEN_IDS = 1024
_MAX_LOGPROB_TOKEN_IDS = 1024
_MAX_BAD_WORDS = 1024
_MAX_LOGIT_BIAS = 100.0
_MAX_PRIORITY = 1000

_OBJECTIVE_RANGES: Mapping[str, Range] = {
    "priority": Range(-_MAX_PRIORITY, _MAX_PRIORITY),
    "time_to_first_token_s": Range(0, above_low=True),
    "seconds_between_tokens": Range(0, above_low=True),
}

_NEUTRAL_SAMPLING = SamplingParams()
_NO_PENALTIES: Mapping[str, float] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_NO_OBJECTIVE = Objective()


class Refusal(Exception):
    """The request cannot be served. `error` goes to the caller."""

    def __init__(
        self, code: Code, message: str, *, field: str = "", value: object = "", bound: str = ""
    ) -> None:
        super().__init__(message)
        self.error = Error(code, message, field, short(value), bound)

    @classmethod
    def of(cls, error: Error) -> Refusal:
        refusal = cls(error.code, error.message)
        refusal.error = error
        return refusal


def _no_ids() -> TokenIds:
    return np.array([], dtype="<u4")


@dataclass(slots=True)
class IncomingRequest:
    """An unchecked GenerateRequest. A field is None if it is absent and 0 has a meaning."""

    request_id: str
    attempt: int
    prompt: TokenIds
    output: TokenIds
    # Names the attempt in responses of one token; 0: none.
    number: int = 0
    model: str = ""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_window_tokens: int | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: abc.Sequence[TokenIds] = ()
    allowed_token_ids: TokenIds = field(default_factory=_no_ids)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: TokenIds = field(default_factory=_no_ids)
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: TokenIds = field(default_factory=_no_ids)
    cache_salt: str = ""
    adapter: str = ""
    # Required content hash; empty: any.
    adapter_hash: str = ""
    priority: int = 0
    deadline_ms: int | None = None
    time_to_first_token_s: float | None = None
    seconds_between_tokens: float | None = None
    latency_sensitive: bool = False
    constraint: Constraint | None = None
    thinking_budget: ThinkingBudget | None = None
    instance_id: str = ""
    hand_back: bool = False
    suspect: bool = False
    # A shard that may have the KV blocks. Unchecked; used only if it is a peer.
    kv_source: str = ""
    images: abc.Sequence[PlacedImage] = ()
    # Only for logs and traces; unchecked.
    label: str = ""
    traceparent: str = ""
    # Tells apart the users of one call; unchecked.
    caller: str = ""


def check(
    incoming: IncomingRequest, info: RunnerInfo, config: ShardConfig, namespace: str = ""
) -> Request:
    """Make the engine's request, with all defaults and with `namespace` before its id.

    Raises:
        Refusal: a field is out of its bounds (INVALID_ARGUMENT), the model or adapter is not loaded
            (NOT_FOUND), or the shard lacks a feature that the request needs (FAILED_PRECONDITION).
    """
    _check_model(incoming.model, config)
    _check_features(incoming, info)
    adapter_hash = check_adapter(incoming.adapter, incoming.adapter_hash, info.adapters)
    if not 1 <= len(incoming.request_id) <= MAX_ID_CHARACTERS:
        _refuse("request_id", len(incoming.request_id), f"1..{MAX_ID_CHARACTERS} characters")
    max_tokens = _check_lengths(incoming, info.max_model_len)
    _check_ids(incoming, info.vocab_size)
    most = config.most_logprobs(info.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(incoming, name)
        if asked is not None and asked > most:
            _refuse(name, asked, f"0..{most} (--max-logprobs)")
    if incoming.constraint is not None:
        _check_constraint(incoming.constraint, config.max_constraint_bytes)
    eos = () if incoming.ignore_eos else info.eos_token_ids
    stop_token_ids = [*incoming.stop_token_ids.tolist(), *eos]
    _check_something_is_left(incoming, stop_token_ids, info.vocab_size)
    only_requested = incoming.logprobs is None and incoming.logprob_token_ids.size
    return Request(
        request_id=namespace + incoming.request_id,
        attempt=incoming.attempt,
        prompt=incoming.prompt.tobytes(),
        output=incoming.output.tobytes(),
        sampling=_sampling(incoming, info.default_sampling),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        logprobs=0 if only_requested else incoming.logprobs,
        # A continued request has them already: they are delivered before the first token.
        prompt_logprobs=None if incoming.output.size else incoming.prompt_logprobs,
        cache_salt=incoming.cache_salt,
        adapter=incoming.adapter,
        adapter_hash=adapter_hash,
        min_tokens=incoming.min_tokens,
        logprob_token_ids=tuple(incoming.logprob_token_ids.tolist()),
        objective=_objective(incoming),
        hand_back=incoming.hand_back,
        kv_source=incoming.kv_source if config.kv_peers else "",
        constraint=incoming.constraint,
        reluctant_stop_ids=_reluctant_stop_ids(incoming, info),
        thinking_budget=incoming.thinking_budget,
        images=_check_images(incoming, info, config),
    )


def check_prefetch(
    incoming: IncomingRequest, info: RunnerInfo, config: ShardConfig, call_id: str
) -> Request:
    """Make a request that only fetches the KV blocks of a later one. Raises as `check`."""
    checked = check(incoming, info, config)
    return msgspec.structs.replace(
        checked, request_id=call_id, attempt=0, constraint=None, only_fetches=True
    )


@dataclass(slots=True)
class IncomingEmbedding:
    """An unchecked EmbedRequest. An absent field is None."""

    request_id: str
    inputs: abc.Sequence[TokenIds]
    pooling: Pooling | None = None
    dimensions: int | None = None
    normalize: bool = False
    instance_id: str = ""
    # The user's own id; not read here.
    label: str = ""


def check_embedding(incoming: IncomingEmbedding, info: RunnerInfo, call_id: str) -> list[Request]:
    """Make a request for each input. `call_id`, which must be unique, begins their ids.

    Raises:
        Refusal: a field is out of its bounds (INVALID_ARGUMENT), or the shard serves no embeddings
            (FAILED_PRECONDITION).
    """
    defaults = info.embedding
    if defaults is None:
        raise Refusal(
            Code.FAILED_PRECONDITION,
            "embed is not served by this shard: its model says of no pooling; start it with "
            "--embeddings last or --embeddings mean",
            field="embed",
        )
    if len(incoming.request_id) > MAX_ID_CHARACTERS:
        _refuse("request_id", len(incoming.request_id), f"at most {MAX_ID_CHARACTERS} characters")
    most = min(MAX_EMBEDDING_INPUTS, _MAX_EMBEDDING_BYTES // (4 * defaults.size))
    if not 1 <= len(incoming.inputs) <= most:
        _refuse("inputs", f"{len(incoming.inputs)} inputs", f"1..{most} inputs")
    if incoming.dimensions is not None and not 1 <= incoming.dimensions <= defaults.size:
        _refuse("dimensions", incoming.dimensions, f"1..{defaults.size}")
    for index, ids in enumerate(incoming.inputs):
        if not 1 <= ids.size <= info.max_model_len:
            bound = f"1..{info.max_model_len} tokens (the context)"
            _refuse(f"inputs[{index}]", f"{ids.size} tokens", bound)
        if int(ids.max()) >= info.vocab_size:
            _refuse("inputs", int(ids.max()), f"0..{info.vocab_size - 1} (the vocabulary)")
    pooling = incoming.pooling or defaults.pooling
    return [
        _pooled(f"{call_id}/{index}", ids, pooling) for index, ids in enumerate(incoming.inputs)
    ]


def _pooled(request_id: str, ids: TokenIds, pooling: Pooling) -> Request:
    return Request(
        request_id=request_id,
        attempt=0,
        prompt=ids.tobytes(),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=1,
        pooling=pooling,
    )


def _check_model(model: str, config: ShardConfig) -> None:
    names = config.served_model_names
    if model and model not in names:
        raise Refusal(
            Code.NOT_FOUND,
            f"model {short(model)!r} is not served here; served: {', '.join(sorted(names))}",
            field="model",
            value=model,
        )


def _check_features(incoming: IncomingRequest, info: RunnerInfo) -> None:
    asked = Asked(
        partial(getattr, incoming),
        constraint=incoming.constraint.kind if incoming.constraint is not None else "",
        is_continued=bool(incoming.output.size),
    )
    unserved = asked.unserved_by(info)
    if unserved is not None:
        raise Refusal(
            Code.FAILED_PRECONDITION,
            unserved.text("this shard"),
            field=unserved.field,
            value=unserved.value,
            bound=unserved.bound,
        )


def check_adapter(name: str, content_hash: str, loaded: abc.Sequence[Adapter]) -> str:
    """Return the content hash of the loaded adapter `name`; "" for the name "".

    Raises `Refusal` if it is not loaded, or has another content than `content_hash` ("" allows
    any).
    """
    if not name:
        return ""
    for adapter in loaded:
        if adapter.name == name:
            if content_hash not in ("", adapter.content_hash):
                text = f"adapter {short(name)!r} is another one here than the request began with"
                raise Refusal(Code.NOT_FOUND, text, field="adapter", value=name)
            return adapter.content_hash
    names = ", ".join(sorted(adapter.name for adapter in loaded)) or "none"
    raise Refusal(
        Code.NOT_FOUND,
        f"adapter {short(name)!r} is not loaded here; loaded: {names}",
        field="adapter",
        value=name,
    )


def _check_lengths(incoming: IncomingRequest, max_model_len: int) -> int:
    num_prompt = incoming.prompt.size
    if not 1 <= num_prompt < max_model_len:
        _refuse(
            "prompt_token_ids",
            f"{num_prompt} tokens",
            f"1..{max_model_len - 1} tokens (the context length is {max_model_len})",
        )
    room = max_model_len - num_prompt
    max_tokens = room if incoming.max_tokens is None else incoming.max_tokens
    if not 1 <= max_tokens <= room:
        _refuse(
            "max_tokens",
            max_tokens,
            f"1..{room} (context length {max_model_len} less {num_prompt} prompt tokens)",
        )
    if incoming.output.size >= max_tokens:
        _refuse(
            "output_token_ids",
            f"{incoming.output.size} tokens",
            f"fewer than max_tokens ({max_tokens})",
        )
    if incoming.min_tokens > max_tokens:
        _refuse("min_tokens", incoming.min_tokens, f"0..{max_tokens} (max_tokens)")
    return max_tokens


def _check_ids(incoming: IncomingRequest, vocab_size: int) -> None:
    for name, most in (
        ("stop_token_ids", _MAX_STOP_TOKEN_IDS),
        ("logprob_token_ids", _MAX_LOGPROB_TOKEN_IDS),
        ("allowed_token_ids", vocab_size),
        ("bad_words", _MAX_BAD_WORDS),
    ):
        if (count := len(getattr(incoming, name))) > most:
            _refuse(name, f"{count} entries", f"at most {most}")
    for word in incoming.bad_words:
        if not 1 <= word.size <= MAX_BAD_WORD_TOKENS:
            bound = f"1..{MAX_BAD_WORD_TOKENS} ids a word"
            _refuse("bad_words", f"a word of {word.size} ids", bound)
    for name, ids in (
        *_marks_of(incoming.thinking_budget),
        ("prompt_token_ids", incoming.prompt),
        ("output_token_ids", incoming.output),
        ("stop_token_ids", incoming.stop_token_ids),
        ("logprob_token_ids", incoming.logprob_token_ids),
        ("allowed_token_ids", incoming.allowed_token_ids),
        ("logit_bias", np.array(list(incoming.logit_bias), dtype="<u4")),
        *(("bad_words", word) for word in incoming.bad_words),
    ):
        if ids.size and int(ids.max()) >= vocab_size:
            _refuse(name, int(ids.max()), f"0..{vocab_size - 1} (the vocabulary)")


def _marks_of(budget: ThinkingBudget | None) -> Iterator[tuple[str, TokenIds]]:
    if budget is not None:
        for name in ("begin_token_id", "end_token_id"):
            yield f"thinking_budget.{name}", np.array([getattr(budget, name)], dtype="<u4")


def _check_images(
    incoming: IncomingRequest, info: RunnerInfo, config: ShardConfig
) -> tuple[PlacedImage, ...]:
    """Check where the images are in the prompt. Their pixels are checked later."""
    end = 0
    if any(group.bidirectional_images for group in info.cache_groups):
        _check_whole_images(incoming, info, config)
    for index, image in enumerate(incoming.images):
        if not 1 <= image.num_tokens <= incoming.prompt.size:
            bound = f"1..{incoming.prompt.size}, the prompt's tokens"
            _refuse(f"images[{index}].num_tokens", image.num_tokens, bound)
        last = incoming.prompt.size - image.num_tokens
        if not end <= image.offset <= last:
            bound = f"{end}..{last}: in the prompt, behind the image before it"
            _refuse(f"images[{index}].offset", image.offset, bound)
        end = image.offset + image.num_tokens
    return tuple(incoming.images)


def _check_whole_images(incoming: IncomingRequest, info: RunnerInfo, config: ShardConfig) -> None:
    """Check that each image fits into one step, beside the largest number of decodes."""
    most = config.batched_tokens(info.device) - config.max_num_seqs
    why = "(--max-num-batched-tokens less --max-num-seqs)"
    if incoming.prompt_logprobs is not None and info.max_scored_tokens < most:
        most, why = info.max_scored_tokens, "with prompt_logprobs"
    for index, image in enumerate(incoming.images):
        if image.num_tokens > most:
            bound = f"at most {most}, as many as a step has for one {why}"
            _refuse(f"images[{index}].num_tokens", image.num_tokens, bound)


def _check_constraint(constraint: Constraint, max_bytes: int) -> None:
    """Check only a constraint's size: compiling it here would take too long."""
    kind, options = constraint.kind, constraint.options
    if kind == "choice" and not 1 <= len(options) <= MAX_CHOICE_OPTIONS:
        _refuse(kind, f"{len(options)} options", f"1..{MAX_CHOICE_OPTIONS} options")
    size = sum(len(text.encode()) for text in (constraint.value, *options))
    if size > max_bytes:
        _refuse(kind, f"{size} bytes", f"at most {max_bytes} bytes (--max-constraint-bytes)")


def _reluctant_stop_ids(incoming: IncomingRequest, info: RunnerInfo) -> frozenset[int]:
    """Return eos ids that the request ignores until its constraint is complete."""
    if incoming.constraint is None or not incoming.ignore_eos:
        return frozenset()
    return frozenset(info.eos_token_ids)


def _check_something_is_left(
    incoming: IncomingRequest, stop_token_ids: abc.Sequence[int], vocab_size: int
) -> None:
    """Refuse a request that bans all its allowed token ids at its next position."""
    allowed: abc.Sequence[int] = incoming.allowed_token_ids.tolist() or range(vocab_size)
    never = {int(word[0]) for word in incoming.bad_words if word.size == 1}
    if incoming.output.size < incoming.min_tokens:
        never.update(stop_token_ids)
    if all(token_id in never for token_id in allowed):
        _refuse(
            "allowed_token_ids",
            f"{len(allowed)} ids",
            "at least one that neither bad_words nor min_tokens rules out",
        )


def _sampling(incoming: IncomingRequest, defaults: Mapping[str, float]) -> SamplingParams:
    values: dict[str, float] = {}
    for name, allowed in SAMPLING_RANGES.items():
        given = getattr(incoming, name)
        neutral = getattr(_NEUTRAL_SAMPLING, name)
        values[name] = value = defaults.get(name, neutral) if given is None else given
        if not allowed.holds(value):
            _refuse(name, value, str(allowed))
    top_k = int(defaults.get("top_k", 0)) if incoming.top_k is None else incoming.top_k
    if top_k < -1:
        _refuse("top_k", top_k, "at least -1")
    bias = Range(-_MAX_LOGIT_BIAS, _MAX_LOGIT_BIAS)
    for token_id, value in incoming.logit_bias.items():
        if not bias.holds(value):
            _refuse("logit_bias", f"{value} for id {token_id}", str(bias))
    if values["temperature"] < GREEDY_TEMPERATURE:
        # Without effect when greedy. So requests that differ only in these are equal.
        values |= {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
        top_k, seed = 0, 0
    else:
        seed = _seed_of(incoming.request_id) if incoming.seed is None else incoming.seed
    window = incoming.penalty_window_tokens
    if window == 0:
        values |= _NO_PENALTIES
    if all(values[name] == neutral for name, neutral in _NO_PENALTIES.items()):
        window = None
    return SamplingParams(
        **values,
        penalty_window_tokens=window,
        top_k=max(0, top_k),
        seed=seed,
        # Sorted: a protobuf map has no order.
        logit_bias=tuple(sorted(incoming.logit_bias.items())),
        bad_words=tuple(tuple(word.tolist()) for word in incoming.bad_words),
        allowed_token_ids=tuple(incoming.allowed_token_ids.tolist()),
    )


def _seed_of(request_id: str) -> int:
    """Return a seed for a request without one. All its attempts get the same seed, so they draw the
    same tokens.
    """
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def _objective(incoming: IncomingRequest) -> Objective | None:
    for name, allowed in _OBJECTIVE_RANGES.items():
        value = getattr(incoming, name)
        if value is not None and not allowed.holds(value):
            _refuse(name, value, str(allowed))
    objective = Objective(
        priority=incoming.priority,
        deadline_s=None if incoming.deadline_ms is None else incoming.deadline_ms / 1000,
        time_to_first_token_s=incoming.time_to_first_token_s,
        seconds_between_tokens=incoming.seconds_between_tokens,
        latency_sensitive=incoming.latency_sensitive,
    )
    return None if objective == _NO_OBJECTIVE else objective


def _refuse(name: str, value: object, bound: str) -> None:
    raise Refusal(
        Code.INVALID_ARGUMENT,
        out_of_bounds(name, value, bound),
        field=name,
        value=value,
        bound=bound,
    )
