"""Calls penstock shards: sends token ids and receives token ids.

    async with Fleet(["127.0.0.1:20051"]) as fleet:
        await fleet.wait_ready()
        async with fleet.submit(GenerationRequest([1, 2, 3], max_tokens=16)) as stream:
            async for output in stream:
                print(output.token_ids)

`ShardClient` calls one shard from asyncio, and `SyncShardClient` does so synchronously.

All names except errors are imported at first use, so that the --help of the `penstock` command does
not wait for gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock_proto.errors import *  # noqa: F403

if TYPE_CHECKING:
    from penstock_client.fleet.failover import Patience as Patience
    from penstock_client.fleet.fleet import Fleet as Fleet
    from penstock_client.fleet.fleet_stream import FleetStream as FleetStream
    from penstock_client.fleet.shard_state import ShardState as ShardState
    from penstock_client.rpc.generation_stream import GenerationStream as GenerationStream
    from penstock_client.rpc.shard_client import ShardClient as ShardClient
    from penstock_client.rpc.sync_client import SyncShardClient as SyncShardClient
    from penstock_common.tls import Tls as Tls
    from penstock_common.tls import TlsFilesUnusable as TlsFilesUnusable
    from penstock_proto.facts import *  # noqa: F403
    from penstock_proto.types import *  # noqa: F403
else:
    # Modules of the names that are neither in `facts` nor in `types`.
    _HOMES = {
        "Patience": "penstock_client.fleet.failover",
        "Fleet": "penstock_client.fleet.fleet",
        "FleetStream": "penstock_client.fleet.fleet_stream",
        "ShardState": "penstock_client.fleet.shard_state",
        "GenerationStream": "penstock_client.rpc.generation_stream",
        "ShardClient": "penstock_client.rpc.shard_client",
        "SyncShardClient": "penstock_client.rpc.sync_client",
        "Tls": "penstock_common.tls",
        "TlsFilesUnusable": "penstock_common.tls",
    }

    def __getattr__(name):
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        facts, types = map(import_module, ("penstock_proto.facts", "penstock_proto.types"))
        return getattr(facts, name) if hasattr(facts, name) else getattr(types, name)
