"""Tells callers what this shard serves."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock_common.version import VERSION
from penstock_proto import MIN_SCHEMA_REVISION, SCHEMA_REVISION
from penstock_proto.facts import ShardInfo, ShardLimits
from penstock_proto.types import SamplingParams
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.messages import Ready


def shard_info(ready: Ready, config: ShardConfig, instance_id: str) -> ShardInfo:
    """Describe the model that the engine has loaded, and how it is served."""
    info = ready.info
    same = {
        field.name: getattr(info, field.name)
        for field in dataclasses.fields(ShardInfo)
        if hasattr(info, field.name)
    }
    defaults: dict[str, Any] = dict(info.default_sampling)
    if "top_k" in defaults:
        defaults["top_k"] = int(defaults["top_k"])
    limits = ShardLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.batched_tokens(info.device),
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_logprobs=config.most_logprobs(info.vocab_size),
    )
    given = {
        "address": "",
        "schema_revision": SCHEMA_REVISION,
        "min_schema_revision": MIN_SCHEMA_REVISION,
        "version": VERSION,
        "instance_id": instance_id,
        "model": config.model_name,
        "model_aliases": tuple(config.served_model_names[1:]),
        "revision": ready.revision,
        "role": config.role,
        "tokenizer_hash": ready.tokenizer_hash,
        "default_sampling": SamplingParams(**defaults),
        "limits": limits,
        "capabilities": info.capabilities | ({"prefetch"} if config.kv_peers else set()),
        "adapters": {adapter.name: adapter for adapter in info.adapters},
    }
    return ShardInfo(**{**same, **given})
