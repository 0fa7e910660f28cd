"""Checks a request against what the shard serves, and fills in the model's defaults.

Pure: an incoming request and the shard's facts in, a complete `Submit` or a `Refusal` out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_shard.config import ShardConfig
from penstock_shard.link import Error, Submit
from penstock_shard.request import SamplingParams
from penstock_shard.runner.base import RunnerInfo

TokenIds = npt.NDArray[np.uint32]

# google.rpc.Code
INVALID_ARGUMENT = 3
NOT_FOUND = 5
FAILED_PRECONDITION = 9

# Below this a temperature means greedy.
GREEDY_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 100.0
MAX_ID_CHARACTERS = 256
_MAX_STOP_TOKEN_IDS = 1024


class Refusal(Exception):
    """The request cannot be served; `error` goes to the caller."""

    def __init__(
        self, code: int, message: str, *, field: str = "", value: object = "", bound: str = ""
    ) -> None:
        super().__init__(message)
        self.error = Error(code, message, field, _short(value), bound)


def _no_ids() -> TokenIds:
    return np.array([], dtype="<u4")


@dataclass(slots=True)
class IncomingRequest:
    """A GenerateRequest as it came: None where a field was absent.

    `features` maps what a capability must cover, by the field's name on the wire, to its value;
    only what differs from the neutral value is there.
    """

    request_id: str
    attempt: int
    prompt: TokenIds
    output: TokenIds
    model: str = ""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    allowed_token_ids: TokenIds = field(default_factory=_no_ids)
    max_tokens: int | None = None
    stop_token_ids: TokenIds = field(default_factory=_no_ids)
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str = ""
    deadline_ms: int | None = None
    features: Mapping[str, object] = field(default_factory=dict)


def check(incoming: IncomingRequest, info: RunnerInfo, config: ShardConfig) -> Submit:
    """The complete request.

    Raises:
        Refusal: a field is out of its bounds (INVALID_ARGUMENT), the model is another (NOT_FOUND),
            or the shard lacks what the request needs (FAILED_PRECONDITION).
    """
    _check_model(incoming.model, config)
    _check_features(incoming, info.capabilities)
    if not 1 <= len(incoming.request_id) <= MAX_ID_CHARACTERS:
        _refuse("request_id", len(incoming.request_id), f"1..{MAX_ID_CHARACTERS} characters")
    max_tokens = _check_lengths(incoming, info.max_model_len)
    if incoming.stop_token_ids.size > _MAX_STOP_TOKEN_IDS:
        _refuse("stop_token_ids", incoming.stop_token_ids.size, f"at most {_MAX_STOP_TOKEN_IDS}")
    if incoming.allowed_token_ids.size > info.vocab_size:
        _refuse("allowed_token_ids", incoming.allowed_token_ids.size, f"{info.vocab_size} ids")
    for name, ids in (
        ("prompt_token_ids", incoming.prompt),
        ("output_token_ids", incoming.output),
        ("stop_token_ids", incoming.stop_token_ids),
        ("allowed_token_ids", incoming.allowed_token_ids),
    ):
        if ids.size and int(ids.max()) >= info.vocab_size:
            _refuse(name, int(ids.max()), f"0..{info.vocab_size - 1} (the vocabulary)")
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(incoming, name)
        if asked is not None and asked > config.max_logprobs:
            _refuse(name, asked, f"0..{config.max_logprobs} (--max-logprobs)")
    eos = () if incoming.ignore_eos else info.eos_token_ids
    return Submit(
        request_id=incoming.request_id,
        attempt=incoming.attempt,
        prompt=incoming.prompt.tobytes(),
        output=incoming.output.tobytes(),
        sampling=_sampling(incoming, info.default_sampling),
        max_tokens=max_tokens,
        stop_token_ids=[*incoming.stop_token_ids.tolist(), *eos],
        logprobs=incoming.logprobs,
        # Those of a continued request were delivered before its first token was.
        prompt_logprobs=None if incoming.output.size else incoming.prompt_logprobs,
        cache_salt=incoming.cache_salt,
    )


def _check_model(model: str, config: ShardConfig) -> None:
    names = {config.model_name, *config.served_model_names}
    if model and model not in names:
        raise Refusal(
            NOT_FOUND,
            f"model {_short(model)!r} is not served here; served: {', '.join(sorted(names))}",
            field="model",
            value=model,
        )


def _check_features(incoming: IncomingRequest, capabilities: frozenset[str]) -> None:
    asked = dict(incoming.features)
    for name in ("prompt_logprobs", "logprobs"):
        if getattr(incoming, name) is not None:
            asked[name] = getattr(incoming, name)
    if incoming.allowed_token_ids.size:
        asked["allowed_token_ids"] = f"{incoming.allowed_token_ids.size} ids"
    for name, value in asked.items():
        if name not in capabilities:
            raise Refusal(
                FAILED_PRECONDITION, f"{name} is not served by this shard", field=name, value=value
            )


def _check_lengths(incoming: IncomingRequest, max_model_len: int) -> int:
    """Returns max_tokens."""
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
    return max_tokens


def _sampling(incoming: IncomingRequest, defaults: Mapping[str, float]) -> SamplingParams:
    def value(name: str, neutral: float) -> Any:
        given = getattr(incoming, name)
        return defaults.get(name, neutral) if given is None else given

    temperature, top_p, min_p = value("temperature", 1.0), value("top_p", 1.0), value("min_p", 0.0)
    top_k = int(value("top_k", 0))
    if not 0 <= temperature <= _MAX_TEMPERATURE or math.isnan(temperature):
        _refuse("temperature", temperature, f"0..{_MAX_TEMPERATURE:g}")
    if not 0 < top_p <= 1:
        _refuse("top_p", top_p, "above 0, at most 1")
    if not 0 <= min_p <= 1:
        _refuse("min_p", min_p, "0..1")
    if top_k < -1:
        _refuse("top_k", top_k, "at least -1")
    allowed = tuple(incoming.allowed_token_ids.tolist())
    if temperature < GREEDY_TEMPERATURE:
        # Greedy leaves nothing to draw: two requests that only differ there are the same.
        return SamplingParams(temperature=0.0, allowed_token_ids=allowed)
    return SamplingParams(
        temperature=temperature,
        top_k=max(0, top_k),
        top_p=top_p,
        min_p=min_p,
        seed=incoming.seed or 0,
        allowed_token_ids=allowed,
    )


def _refuse(name: str, value: object, bound: str) -> None:
    raise Refusal(
        INVALID_ARGUMENT,
        f"{name}: {_short(value)} is out of bounds; allowed: {bound}",
        field=name,
        value=value,
        bound=bound,
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
