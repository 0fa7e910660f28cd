"""Keeps up to date what is known of the pieces of prefixes that a shard holds."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing

from penstock_client.fleet.shard_state import ShardState
from penstock_client.load_balancing.piece_index import PieceIndex
from penstock_common.tasks import run_lasting
from penstock_proto.errors import NotServed, PenstockError
from penstock_proto.facts import BlocksReport

_RETRY_S = 1.0
# A shard that does not tell may be replaced by one that does.
_NOT_SERVED_RETRY_S = 60.0


class PieceWatch:
    """Follows one shard for as long as it belongs to the fleet. Whether it says anything or not,
    and how long ago, means nothing: `ShardWatch` knows whether it lives.
    """

    def __init__(self, shard: ShardState) -> None:
        self._shard = shard
        # All that it holds, as far as it has come.
        self._snapshot: PieceIndex | None = None
        watching = run_lasting(self._watch, f"the watch of blocks of shard {shard.address}")
        self._task = asyncio.get_running_loop().create_task(watching)

    async def close(self) -> None:
        """Watch no more."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            pause_s = _RETRY_S
            try:
                async with aclosing(self._shard.client.watch_blocks()) as reports:
                    async for report in reports:
                        self._take(report)
            except NotServed:
                pause_s = _NOT_SERVED_RETRY_S
            except PenstockError:
                pass
            except asyncio.CancelledError:
                # gRPC cancels a call whose channel was closed.
                if self._task.cancelling():
                    raise
            await asyncio.sleep(pause_s)

    def _take(self, report: BlocksReport) -> None:
        """Take a report. Pieces known before stay in use until a snapshot is complete."""
        pieces = self._shard.pieces_of(report.instance_id)
        if report.snapshot_begins:
            self._snapshot = PieceIndex()
        if self._snapshot is None:
            pieces.take(report.pieces)
            return
        for tier, names in report.pieces.items():
            for name in names:
                self._snapshot.put(name, tier)
        if report.snapshot_ends:
            pieces.told, self._snapshot = self._snapshot, None
