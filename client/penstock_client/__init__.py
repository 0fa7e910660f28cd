"""Speaks to penstock shards: token ids in, token ids out.

    async with Fleet(["127.0.0.1:20051"]) as fleet:
        await fleet.wait_ready()
        async with fleet.submit(GenerationRequest([1, 2, 3], max_tokens=16)) as stream:
            async for output in stream:
                print(output.token_ids)

`ShardClient` is one shard for asyncio, `SyncShardClient` its synchronous twin.

Names are imported when they are first used: the `penstock` command lives here too, and its --help
should not wait for gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_client.errors import (
        DeadlineExceeded,
        IncompatibleShard,
        InvalidRequest,
        NoShardAvailable,
        NotServed,
        Overloaded,
        PenstockError,
        PoisonousRequest,
        RequestRefused,
        ShardFailed,
        ShardUnavailable,
        Unauthenticated,
    )
    from penstock_client.fleet.failover import Patience
    from penstock_client.fleet.fleet import Fleet
    from penstock_client.fleet.fleet_stream import FleetStream
    from penstock_client.fleet.shard_state import ShardState
    from penstock_client.rpc.generation_stream import GenerationStream
    from penstock_client.rpc.shard_client import ShardClient
    from penstock_client.rpc.sync_client import SyncShardClient
    from penstock_client.types import (
        Adapter,
        Attempt,
        Constraint,
        ConstraintKind,
        DrainProgress,
        EmbeddingDefaults,
        EmbeddingRequest,
        FinishReason,
        GenerationRequest,
        LoadReport,
        Logprobs,
        Objective,
        Output,
        SamplingParams,
        ShardInfo,
        ShardLimits,
        ThinkingBudget,
        random_seed,
    )
    from penstock_common.tls import Tls, TlsFilesUnusable

__all__ = [
    "Adapter",
    "Attempt",
    "Constraint",
    "ConstraintKind",
    "DeadlineExceeded",
    "DrainProgress",
    "EmbeddingDefaults",
    "EmbeddingRequest",
    "FinishReason",
    "Fleet",
    "FleetStream",
    "GenerationRequest",
    "GenerationStream",
    "IncompatibleShard",
    "InvalidRequest",
    "LoadReport",
    "Logprobs",
    "NoShardAvailable",
    "NotServed",
    "Objective",
    "Output",
    "Overloaded",
    "Patience",
    "PenstockError",
    "PoisonousRequest",
    "RequestRefused",
    "SamplingParams",
    "ShardClient",
    "ShardFailed",
    "ShardInfo",
    "ShardLimits",
    "ShardState",
    "ShardUnavailable",
    "SyncShardClient",
    "ThinkingBudget",
    "Tls",
    "TlsFilesUnusable",
    "Unauthenticated",
    "random_seed",
]

_OTHER_HOMES = {
    "Fleet": "penstock_client.fleet.fleet",
    "FleetStream": "penstock_client.fleet.fleet_stream",
    "Patience": "penstock_client.fleet.failover",
    "ShardState": "penstock_client.fleet.shard_state",
    "ShardClient": "penstock_client.rpc.shard_client",
    "GenerationStream": "penstock_client.rpc.generation_stream",
    "SyncShardClient": "penstock_client.rpc.sync_client",
    "Tls": "penstock_common.tls",
    "TlsFilesUnusable": "penstock_common.tls",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    errors = import_module("penstock_client.errors")
    other = "penstock_client.errors" if hasattr(errors, name) else "penstock_client.types"
    value = getattr(import_module(_OTHER_HOMES.get(name, other)), name)
    globals()[name] = value
    return value
