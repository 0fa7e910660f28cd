"""Requests as vLLM's core takes them. What vLLM cannot honour is refused before it gets there: a
request that raises in vLLM's worker ends the engine for all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock_shard.ipc.codes import Code
from penstock_shard.ipc.messages import Error
from penstock_shard.ipc.request import CONSTRAINT_KINDS, Request

# What requests may ask of it; see `server/validation.py`.
CAPABILITIES = frozenset(
    (
        *sorted(CONSTRAINT_KINDS),
        *("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
        *("min_tokens", "logprobs", "prompt_logprobs", "priority"),
    )
)
# In vLLM's extra arguments: how many tokens at the end of a prompt are output.
OUTPUT_TOKENS = "penstock_output_tokens"
# vLLM's worker checks these during a step, and its engine does not survive that.
_MOST_BIASED = 1024
_MOST_ALLOWED = 1024
_MOST_STOPS_BELOW_MINIMUM = 128
_MOST_BAD_WORDS = 128
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.01, 2.0


@dataclass(frozen=True, slots=True)
class Continuation:
    """The way requests go on after output that they bring: as vLLM's output, or as a part of the
    prompt; and fields that would be honoured wrongly then.
    """

    as_output: bool
    lacks: frozenset[str]


# What vLLM counts output for, if that came as a part of the prompt.
COUNTED = ("presence_penalty", "frequency_penalty", "bad_words")
AS_PROMPT = Continuation(as_output=False, lacks=frozenset(COUNTED))


class CannotServe(Exception):
    """A request that this engine does not take; others may."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        super().__init__(field)
        self.error = Error(
            Code.FAILED_PRECONDITION,
            f"{field}: {value} is not served by this shard's engine: {bound}",
            field=field,
            value=str(value),
            bound=bound,
        )


def core_id(request_id: str, attempt: int) -> str:
    """The name of an attempt in vLLM's core."""
    return f"{request_id}/{attempt}"


def prompt_of(request: Request) -> dict[str, Any]:
    """The prompt as vLLM's processor takes it, with the output that was delivered before."""
    ids = np.frombuffer(request.prompt + request.output, dtype="<u4").tolist()
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": ids}
    if request.cache_salt:
        prompt["cache_salt"] = request.cache_salt
    return prompt


def grammar_of(request: Request) -> str:
    """The text that stands for the request's constraint in vLLM, which `grammars.py` reads; "" if
    it has none.
    """
    if request.constraint is None:
        return ""
    return msgspec.json.encode(msgspec.structs.replace(request, prompt=b"")).decode()


def sampling_of(request: Request, continuation: Continuation) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams`. Raises `CannotServe`."""
    _check(request, continuation)
    sampling, given = request.sampling, len(request.output) // 4
    as_prompt = 0 if continuation.as_output else given
    # A constraint tells where these may end it, and how many tokens it takes at least.
    reluctant = request.reluctant_stop_ids if request.constraint else frozenset[int]()
    min_tokens = 0 if request.constraint else request.min_tokens
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": _seed(sampling.seed, as_prompt),
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "max_tokens": request.max_tokens - as_prompt,
        "min_tokens": max(0, min_tokens - as_prompt),
        "stop_token_ids": sorted(request.stop_token_ids | reluctant),
        # Ids that end a sequence are all among those above.
        "ignore_eos": True,
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "detokenize": False,
        "skip_clone": True,
        "extra_args": {OUTPUT_TOKENS: given} if given and continuation.as_output else None,
    }


def _seed(seed: int, given: int) -> int:
    """A seed that vLLM takes, a signed number. If so many tokens of output are given as prompt, its
    generator begins anew, and gets a seed of its own: the distribution is kept, tokens are not.
    """
    if given:
        digest = hashlib.blake2b(f"{seed}:{given}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    signed = seed - 2**64 if seed >= 2**63 else seed
    # -1 stands for none there.
    return 0 if signed == -1 else signed


def _check(request: Request, continuation: Continuation) -> None:
    """Raises `CannotServe`."""
    sampling = request.sampling
    temperature = sampling.temperature
    if temperature > _MOST_TEMPERATURE or 0 < temperature < _LEAST_TEMPERATURE:
        bound = f"0, or {_LEAST_TEMPERATURE:g} to {_MOST_TEMPERATURE:g}"
        raise CannotServe("temperature", temperature, bound)
    bounds = {
        "logit_bias": (len(sampling.logit_bias), _MOST_BIASED),
        "allowed_token_ids": (len(sampling.allowed_token_ids), _MOST_ALLOWED),
        "bad_words": (len(sampling.bad_words), _MOST_BAD_WORDS),
    }
    if request.min_tokens:
        bounds["stop_token_ids"] = (len(request.stop_token_ids), _MOST_STOPS_BELOW_MINIMUM)
    for field, (count, most) in bounds.items():
        if count > most:
            raise CannotServe(field, count, f"at most {most}")
    if request.output:
        _check_continuation(request, continuation)


def _check_continuation(request: Request, continuation: Continuation) -> None:
    """Refuse what would go on wrongly from the output that a request brings."""
    sampling = request.sampling
    counted = {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "bad_words": len(sampling.bad_words),
        "min_tokens": 0 if request.constraint else request.min_tokens,
    }
    if request.prompt_logprobs is not None:
        raise CannotServe("prompt_logprobs", request.prompt_logprobs, "a continuation has none")
    for field, value in counted.items():
        if value and field in continuation.lacks:
            raise CannotServe(field, value, "a continuation has none")
