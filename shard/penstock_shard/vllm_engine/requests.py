"""Requests in the form of vLLM's core, and the fields that it supports. The server refuses others,
because a request that fails in vLLM's worker ends the engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock_proto.engine_request import EngineRequest
from penstock_proto.facts import FieldBound
from penstock_proto.types import CONSTRAINT_KINDS

# Features that requests may use; see `server/validation.py`.
CAPABILITIES = frozenset(
    (
        *sorted(CONSTRAINT_KINDS),
        *("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
        *("min_tokens", "logprobs", "prompt_logprobs", "priority", "adapter"),
    )
)
# A key of vLLM's extra arguments: the number of output tokens at a prompt's end.
OUTPUT_TOKENS = "penstock_output_tokens"
MOST_BAD_WORDS = 128
_MOST_STOP_TOKEN_IDS = 128
# Fields for which vLLM counts output; wrongly, if output is part of the prompt.
COUNTED = frozenset(("presence_penalty", "frequency_penalty", "bad_words"))


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request in vLLM's terms. `bad_words` are token ids; see `grammar_of` for `grammar`."""

    name: str
    prompt: dict[str, Any]
    sampling: dict[str, Any]
    bad_words: list[list[int]]
    grammar: str
    priority: int
    # True if the request asks for an embedding.
    pools: bool


def bounds(num_eos: int) -> tuple[FieldBound, ...]:
    """Return vLLM's bounds of some fields, for a model with `num_eos` eos ids. vLLM's worker checks
    lengths only during a step, where a failure ends the engine. vLLM replaces small temperatures.
    """
    return (
        FieldBound("temperature", least=0.01, most=2.0),
        FieldBound("logit_bias", most=1024),
        FieldBound("allowed_token_ids", most=1024),
        FieldBound("stop_token_ids", most=_MOST_STOP_TOKEN_IDS - num_eos),
        FieldBound("bad_words", most=MOST_BAD_WORDS),
    )


def core_id(request_id: str, attempt: int) -> str:
    return f"{request_id}/{attempt}"


def core_request(request: EngineRequest, *, as_output: bool) -> CoreRequest:
    """Translate the request; `as_output` as in `sampling_of`."""
    return CoreRequest(
        core_id(request.request_id, request.attempt),
        prompt_of(request),
        sampling_of(request, as_output=as_output),
        [list(word) for word in request.sampling.bad_words],
        grammar_of(request),
        request.priority,
        request.pooling is not None,
    )


def prompt_of(request: EngineRequest) -> dict[str, Any]:
    """Return the prompt for vLLM's processor, with the earlier output."""
    ids = np.frombuffer(request.prompt + request.output, dtype="<u4").tolist()
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": ids}
    if request.cache_salt:
        prompt["cache_salt"] = request.cache_salt
    return prompt


def grammar_of(request: EngineRequest) -> str:
    """Return a text for `grammars.py` with the request's constraint; "" if it has none."""
    if request.constraint is None:
        return ""
    return msgspec.json.encode(msgspec.structs.replace(request, prompt=b"")).decode()


def sampling_of(request: EngineRequest, *, as_output: bool) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `SamplingParams`. Earlier output counts as output if
    `as_output`, else as part of the prompt.
    """
    sampling, given = request.sampling, len(request.output) // 4
    as_prompt = 0 if as_output else given
    # A constraint itself decides about these ids and the minimal length.
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
        # stop_token_ids has all ids that end a sequence.
        "ignore_eos": True,
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "detokenize": False,
        "skip_clone": True,
        "extra_args": {OUTPUT_TOKENS: given} if given and as_output else None,
    }


def _seed(seed: int, given: int) -> int:
    """Return a signed seed for vLLM. With `given` output tokens in the prompt, it is another seed,
    because vLLM's generator restarts: tokens differ, but follow the same distribution.
    """
    if given:
        digest = hashlib.blake2b(f"{seed}:{given}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    signed = seed - 2**64 if seed >= 2**63 else seed
    # In vLLM -1 means no seed.
    return 0 if signed == -1 else signed
