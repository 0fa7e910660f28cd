"""The state of a shard, in the words of the API, the console and the metrics."""

from __future__ import annotations

from typing import Any

from penstock_client import ShardState


def state_of(shard: ShardState) -> str:
    """Return serving, loading, draining or gone."""
    if not shard.connected:
        return "gone"
    if shard.load.draining or shard.leaving:
        return "draining"
    return "serving" if shard.ready else "loading"


def model_of(shard: ShardState) -> str:
    """Return the model that the shard serves or served last; "" if unknown."""
    info = shard.info or shard.last_info
    return "" if info is None else info.model


def describe_shard(shard: ShardState) -> dict[str, Any]:
    """Describe the shard for the API and the console, with None for unknown values."""
    info, load = shard.info, shard.load
    return {
        "address": shard.address,
        "state": state_of(shard),
        "problem": shard.problem,
        "model": model_of(shard) or None,
        "instance_id": None if info is None else info.instance_id,
        "running": load.running,
        "waiting": load.waiting,
        "kv_blocks": load.num_blocks,
        "kv_used_blocks": load.referenced_blocks,
    }
