"""Shards at which a request may go on, and the defaults it has there."""

from __future__ import annotations

import dataclasses

from penstock_proto.facts import ShardInfo
from penstock_proto.types import GenerationRequest, SamplingParams


def same_model(first: ShardInfo, second: ShardInfo) -> bool:
    """Tell whether one shard may continue a request that the other began."""
    return (
        first.weights_hash == second.weights_hash
        and first.tokenizer_hash == second.tokenizer_hash
        and first.eos_token_ids == second.eos_token_ids
    )


def same_adapter(first: ShardInfo, second: ShardInfo, name: str) -> bool:
    """Tell whether both have the adapter of this name ("" is none), of the same content."""
    return first.has_adapter(name) and second.has_adapter(name, first.adapter_hash(name))


def same_numerics(first: ShardInfo, second: ShardInfo) -> bool:
    """Tell whether both are known to compute the same bits."""
    return bool(first.numerics_fingerprint) and (
        first.numerics_fingerprint == second.numerics_fingerprint
    )


def complete_request(request: GenerationRequest, info: ShardInfo) -> GenerationRequest:
    """The request with the shard's defaults where it says nothing, and with the content hash of the
    adapter that has its adapter's name there.
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
    """`sampling` with the model's defaults for fields that are None."""
    stated = {
        field.name: getattr(defaults, field.name)
        for field in dataclasses.fields(SamplingParams)
        if getattr(sampling, field.name) is None
    }
    return dataclasses.replace(sampling, **stated) if stated else sampling
