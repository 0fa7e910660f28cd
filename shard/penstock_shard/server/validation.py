"""Checks a request against what the shard serves, and fills in the model's defaults.

Pure functions of a submission, `RunnerInfo` and configuration; they return an
`EngineRequest` or raise a `Refusal`.
"""

from __future__ import annotations

import hashlib
from collections import abc
from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.facts import Adapter
from penstock_proto.features import Asked
from penstock_proto.limits import (
    GREEDY_TEMPERATURE,
    LOGIT_BIAS_RANGE,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CHOICE_OPTIONS,
    MAX_EMBEDDING_BYTES,
    MAX_EMBEDDING_INPUTS,
    MAX_ID_CHARACTERS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    NO_PENALTIES,
    OBJECTIVE_RANGES,
    SAMPLING_RANGES,
    out_of_bounds,
    short,
)
from penstock_proto.types import (
    Constraint,
    EmbeddingRequest,
    EngineSampling,
    Error,
    GenerationRequest,
    Objective,
    Pooling,
    PromptImage,
    Submission,
    ThinkingBudget,
)
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.runner_info import RunnerInfo

TokenIds = npt.NDArray[np.uint32]

_NEUTRAL_SAMPLING = EngineSampling()
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


def check(
    submission: Submission, info: RunnerInfo, config: ShardConfig, namespace: str = ""
) -> EngineRequest:
    """Make the engine's request, with all defaults and with `namespace` before its id.

    Raises:
        Refusal: a field is out of its bounds (INVALID_ARGUMENT), the model or adapter is not loaded
            (NOT_FOUND), or the shard lacks a feature that the request needs (FAILED_PRECONDITION).
    """
    asked, attempt = submission.request, submission.attempt
    _check_model(asked.model, config)
    _check_features(asked, info)
    adapter_hash = check_adapter(asked.adapter, asked.adapter_hash, info.adapters)
    if not 1 <= len(submission.request_id) <= MAX_ID_CHARACTERS:
        bound = f"1..{MAX_ID_CHARACTERS} characters"
        _refuse("request_id", len(submission.request_id), bound)
    max_tokens = _check_lengths(asked, info.max_model_len)
    _check_ids(asked, info.vocab_size)
    most = config.most_logprobs(info.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(asked, name)
        if count is not None and count > most:
            _refuse(name, count, f"0..{most} (--max-logprobs)")
    if asked.constraint is not None:
        _check_constraint(asked.constraint, config.max_constraint_bytes)
    eos = () if asked.ignore_eos else info.eos_token_ids
    stop_token_ids = frozenset((*asked.stop_token_ids, *eos))
    _check_something_is_left(asked, stop_token_ids, info.vocab_size)
    only_requested = asked.logprobs is None and asked.logprob_token_ids
    return EngineRequest(
        request_id=namespace + submission.request_id,
        attempt=attempt.number,
        prompt=_array(asked.prompt_token_ids).tobytes(),
        output=_array(asked.output_token_ids).tobytes(),
        sampling=_sampling(submission, info.default_sampling),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        logprobs=0 if only_requested else asked.logprobs,
        # A continued request has them already: they are delivered before the first token.
        prompt_logprobs=None if asked.output_token_ids else asked.prompt_logprobs,
        cache_salt=asked.cache_salt,
        adapter=asked.adapter,
        adapter_hash=adapter_hash,
        min_tokens=asked.min_tokens or 0,
        logprob_token_ids=tuple(asked.logprob_token_ids),
        objective=_objective(asked.objective),
        hand_back=attempt.hand_back,
        kv_source=attempt.kv_source if config.kv_peers else "",
        constraint=asked.constraint,
        reluctant_stop_ids=_reluctant_stop_ids(asked, info),
        thinking_budget=asked.thinking_budget,
        images=_check_images(asked, info, config),
    )


def check_prefetch(
    submission: Submission, info: RunnerInfo, config: ShardConfig, call_id: str
) -> EngineRequest:
    """Make a request that only fetches the KV blocks of a later one. Raises as `check`."""
    checked = check(submission, info, config)
    return msgspec.structs.replace(
        checked, request_id=call_id, attempt=0, constraint=None, only_fetches=True
    )


def check_embedding(
    asked: EmbeddingRequest, request_id: str, info: RunnerInfo, call_id: str
) -> list[EngineRequest]:
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
    if len(request_id) > MAX_ID_CHARACTERS:
        _refuse("request_id", len(request_id), f"at most {MAX_ID_CHARACTERS} characters")
    most = min(MAX_EMBEDDING_INPUTS, MAX_EMBEDDING_BYTES // (4 * defaults.size))
    if not 1 <= len(asked.inputs) <= most:
        _refuse("inputs", f"{len(asked.inputs)} inputs", f"1..{most} inputs")
    if asked.dimensions is not None and not 1 <= asked.dimensions <= defaults.size:
        _refuse("dimensions", asked.dimensions, f"1..{defaults.size}")
    inputs = [_array(ids) for ids in asked.inputs]
    for index, ids in enumerate(inputs):
        if not 1 <= ids.size <= info.max_model_len:
            bound = f"1..{info.max_model_len} tokens (the context)"
            _refuse(f"inputs[{index}]", f"{ids.size} tokens", bound)
        if int(ids.max()) >= info.vocab_size:
            _refuse("inputs", int(ids.max()), f"0..{info.vocab_size - 1} (the vocabulary)")
    pooling = Pooling(asked.pooling) if asked.pooling else defaults.pooling
    return [_pooled(f"{call_id}/{index}", ids, pooling) for index, ids in enumerate(inputs)]


def _pooled(request_id: str, ids: TokenIds, pooling: Pooling) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        attempt=0,
        prompt=ids.tobytes(),
        sampling=EngineSampling(temperature=0.0),
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


def _check_features(asked: GenerationRequest, info: RunnerInfo) -> None:
    unserved = Asked(asked).unserved_by(info)
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


def _check_lengths(asked: GenerationRequest, max_model_len: int) -> int:
    num_prompt, num_output = len(asked.prompt_token_ids), len(asked.output_token_ids)
    if not 1 <= num_prompt < max_model_len:
        _refuse(
            "prompt_token_ids",
            f"{num_prompt} tokens",
            f"1..{max_model_len - 1} tokens (the context length is {max_model_len})",
        )
    room = max_model_len - num_prompt
    max_tokens = room if asked.max_tokens is None else asked.max_tokens
    if not 1 <= max_tokens <= room:
        _refuse(
            "max_tokens",
            max_tokens,
            f"1..{room} (context length {max_model_len} less {num_prompt} prompt tokens)",
        )
    if num_output >= max_tokens:
        _refuse(
            "output_token_ids",
            f"{num_output} tokens",
            f"fewer than max_tokens ({max_tokens})",
        )
    if asked.min_tokens is not None and asked.min_tokens > max_tokens:
        _refuse("min_tokens", asked.min_tokens, f"0..{max_tokens} (max_tokens)")
    return max_tokens


def _check_ids(asked: GenerationRequest, vocab_size: int) -> None:
    sampling = asked.sampling
    for name, entries, most in (
        ("stop_token_ids", asked.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logprob_token_ids", asked.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS),
        ("allowed_token_ids", sampling.allowed_token_ids, vocab_size),
        ("bad_words", sampling.bad_words, MAX_BAD_WORDS),
    ):
        if len(entries) > most:
            _refuse(name, f"{len(entries)} entries", f"at most {most}")
    for word in sampling.bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            bound = f"1..{MAX_BAD_WORD_TOKENS} ids a word"
            _refuse("bad_words", f"a word of {len(word)} ids", bound)
    for name, ids in (
        *_marks_of(asked.thinking_budget),
        ("prompt_token_ids", asked.prompt_token_ids),
        ("output_token_ids", asked.output_token_ids),
        ("stop_token_ids", asked.stop_token_ids),
        ("logprob_token_ids", asked.logprob_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logit_bias", list(sampling.logit_bias)),
        *(("bad_words", word) for word in sampling.bad_words),
    ):
        if len(ids) and (largest := int(_array(ids).max())) >= vocab_size:
            _refuse(name, largest, f"0..{vocab_size - 1} (the vocabulary)")


def _marks_of(budget: ThinkingBudget | None) -> Iterator[tuple[str, abc.Sequence[int]]]:
    if budget is not None:
        for name in ("begin_token_id", "end_token_id"):
            yield f"thinking_budget.{name}", [getattr(budget, name)]


def _check_images(
    asked: GenerationRequest, info: RunnerInfo, config: ShardConfig
) -> tuple[PromptImage, ...]:
    """Check where the images are in the prompt. Their pixels are checked later."""
    end = 0
    if any(group.bidirectional_images for group in info.cache_groups):
        _check_whole_images(asked, info, config)
    for index, image in enumerate(asked.images):
        if not 1 <= image.num_tokens <= len(asked.prompt_token_ids):
            bound = f"1..{len(asked.prompt_token_ids)}, the prompt's tokens"
            _refuse(f"images[{index}].num_tokens", image.num_tokens, bound)
        last = len(asked.prompt_token_ids) - image.num_tokens
        if not end <= image.offset <= last:
            bound = f"{end}..{last}: in the prompt, behind the image before it"
            _refuse(f"images[{index}].offset", image.offset, bound)
        end = image.offset + image.num_tokens
    return tuple(asked.images)


def _check_whole_images(asked: GenerationRequest, info: RunnerInfo, config: ShardConfig) -> None:
    """Check that each image fits into one step, beside the largest number of decodes."""
    most = config.batched_tokens(info.device) - config.max_num_seqs
    why = "(--max-num-batched-tokens less --max-num-seqs)"
    if asked.prompt_logprobs is not None and info.max_scored_tokens < most:
        most, why = info.max_scored_tokens, "with prompt_logprobs"
    for index, image in enumerate(asked.images):
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


def _reluctant_stop_ids(asked: GenerationRequest, info: RunnerInfo) -> frozenset[int]:
    """Return eos ids that the request ignores until its constraint is complete."""
    if asked.constraint is None or not asked.ignore_eos:
        return frozenset()
    return frozenset(info.eos_token_ids)


def _check_something_is_left(
    asked: GenerationRequest, stop_token_ids: abc.Set[int], vocab_size: int
) -> None:
    """Refuse a request that bans all of its allowed token ids at its next position."""
    allowed = asked.sampling.allowed_token_ids or range(vocab_size)
    never = {word[0] for word in asked.sampling.bad_words if len(word) == 1}
    if len(asked.output_token_ids) < (asked.min_tokens or 0):
        never.update(stop_token_ids)
    if all(token_id in never for token_id in allowed):
        _refuse(
            "allowed_token_ids",
            f"{len(allowed)} ids",
            "at least one that neither bad_words nor min_tokens rules out",
        )


def _sampling(submission: Submission, defaults: Mapping[str, float]) -> EngineSampling:
    asked = submission.request.sampling
    values: dict[str, float] = {}
    for name, allowed in SAMPLING_RANGES.items():
        given = getattr(asked, name)
        neutral = getattr(_NEUTRAL_SAMPLING, name)
        values[name] = value = defaults.get(name, neutral) if given is None else given
        if not allowed.holds(value):
            _refuse(name, value, str(allowed))
    top_k = int(defaults.get("top_k", 0)) if asked.top_k is None else asked.top_k
    if top_k < -1:
        _refuse("top_k", top_k, "at least -1")
    for token_id, value in asked.logit_bias.items():
        if not LOGIT_BIAS_RANGE.holds(value):
            _refuse("logit_bias", f"{value} for id {token_id}", str(LOGIT_BIAS_RANGE))
    if values["temperature"] < GREEDY_TEMPERATURE:
        # These have no effect when greedy, so requests that differ only in them become equal.
        values |= {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
        top_k, seed = 0, 0
    else:
        seed = _seed_of(submission.request_id) if asked.seed is None else asked.seed
    window = asked.penalty_window_tokens
    if window == 0:
        values |= NO_PENALTIES
    if all(values[name] == neutral for name, neutral in NO_PENALTIES.items()):
        window = None
    return EngineSampling(
        **values,
        penalty_window_tokens=window,
        top_k=max(0, top_k),
        seed=seed,
        # Sorted: a protobuf map has no order.
        logit_bias=tuple(sorted(asked.logit_bias.items())),
        bad_words=tuple(tuple(word) for word in asked.bad_words),
        allowed_token_ids=tuple(asked.allowed_token_ids),
    )


def _seed_of(request_id: str) -> int:
    """Return a seed for a request without one. All its attempts get the same seed, so they draw the
    same tokens.
    """
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def _objective(asked: Objective) -> Objective | None:
    for name, allowed in OBJECTIVE_RANGES.items():
        value = getattr(asked, name)
        if value is not None and not allowed.holds(value):
            _refuse(name, value, str(allowed))
    objective = replace(
        asked,
        priority=asked.priority or None,
        latency_sensitive=asked.latency_sensitive or None,
    )
    return None if objective == _NO_OBJECTIVE else objective


def _array(ids: abc.Sequence[int]) -> TokenIds:
    return np.asarray(ids, dtype="<u4")


def _refuse(name: str, value: object, bound: str) -> None:
    raise Refusal(
        Code.INVALID_ARGUMENT,
        out_of_bounds(name, value, bound),
        field=name,
        value=value,
        bound=bound,
    )
