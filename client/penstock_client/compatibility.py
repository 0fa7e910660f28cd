"""Where a request may go on, and what it is told there. Knows what shards say of themselves, and no
stream.
"""

from __future__ import annotations

import dataclasses

from penstock_client.types import GenerationRequest, SamplingParams, ShardInfo


def same_model(first: ShardInfo, second: ShardInfo) -> bool:
    """Whether one may go on where the other left off."""
    return (
        first.weights_hash == second.weights_hash
        and first.tokenizer_hash == second.tokenizer_hash
        and first.eos_token_ids == second.eos_token_ids
    )


def same_adapter(first: ShardInfo, second: ShardInfo, name: str) -> bool:
    """Whether both have the adapter of this name ("" is none), of the same content."""
    return first.has_adapter(name) and second.has_adapter(name, first.adapter_hash(name))


def same_numerics(first: ShardInfo, second: ShardInfo) -> bool:
    """Whether they compute the same bits."""
    return bool(first.numerics_fingerprint) and (
        first.numerics_fingerprint == second.numerics_fingerprint
    )


def sees_all(info: ShardInfo, request: GenerationRequest) -> bool:
    """Whether its revision of the wire has all that the request says: it would drop the rest in
    silence. What the first revision had a shard refuses itself, where it does not serve it.
    """
    return request.thinking_budget is None or "thinking_budget" in info.capabilities


def complete_request(request: GenerationRequest, info: ShardInfo) -> GenerationRequest:
    """With what the model's own defaults say where nothing was asked for, and the adapter that has
    its name there.
    """
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = info.max_model_len - len(request.prompt_token_ids)
    sampling = _with_defaults(request.sampling, info.default_sampling)
    return dataclasses.replace(
        request,
        sampling=sampling,
        max_tokens=max_tokens,
        adapter_hash=request.adapter_hash or info.adapter_hash(request.adapter),
    )


def _with_defaults(sampling: SamplingParams, defaults: SamplingParams) -> SamplingParams:
    """With the defaults of the model where nothing was asked for."""
    stated = {
        field.name: getattr(defaults, field.name)
        for field in dataclasses.fields(SamplingParams)
        if getattr(sampling, field.name) is None
    }
    return dataclasses.replace(sampling, **stated) if stated else sampling
