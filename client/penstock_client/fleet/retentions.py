"""Tells shards that clients will go on from requests that have ended."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.shard_state import ShardState
from penstock_proto.types import Retain

# Ids in one call.
_MOST_IDS = 1024


class Retentions:
    """Sends what came up in a turn of the event loop in one call for each shard and hint. A hint
    is sent once: a shard that does not get it, or does not know it, retains nothing.
    """

    def __init__(self) -> None:
        self._due: dict[tuple[ShardState, Retain], list[str]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, shard: ShardState, stream: FleetStream, retain: Retain) -> bool:
        """Have a shard retain the KV blocks of a request that it has ended; False if this turn of
        the event loop has too many.
        """
        if not self._due:
            asyncio.get_running_loop().call_soon(self._send)
        ids = self._due[shard, retain]
        if len(ids) >= _MOST_IDS:
            return False
        ids.append(stream.request_id)
        return True

    def _send(self) -> None:
        due, self._due = self._due, defaultdict(list)
        for (shard, retain), ids in due.items():
            task = asyncio.get_running_loop().create_task(shard.client.retain(ids, retain))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Send nothing more."""
        self._due.clear()
        for task in self._tasks:
            task.cancel()
