"""Chooses requests to leave a shard where they wait, while another shard has room for them.

A queue grows where requests are longer than the policy could know, and a shard that joins begins
with none. What waits loses nothing when it goes, and disturbs no other request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping

from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.shard_state import ShardState
from penstock_client.load_balancing.base import LEAST_URGENT
from penstock_common.tasks import run_lasting

# Why such a stream left, in its attempts and in metrics.
REBALANCE = "rebalance"

# How often to look. A stream without a token from one look to the next waits, if its shard has many
# to compute first; shorter waits are usual.
_LOOK_INTERVAL_S = 1.0


class Rebalancing:
    """Chooses among the streams of one client, in a task of its own until it is closed."""

    def __init__(
        self,
        shards: Mapping[str, ShardState],
        running: Callable[[ShardState], Collection[FleetStream]],
        put_due: Callable[[Iterable[FleetStream]], None],
    ) -> None:
        """`running` gives the streams on a shard in the order in which they came there; `put_due`
        is called with those that should go.
        """
        self._shards = shards
        self._running = running
        self._put_due = put_due
        # At the last look, of each stream on a shard with prompts to compute.
        self._num_tokens: dict[FleetStream, int] = {}
        self._chosen: set[FleetStream] = set()
        self._task = asyncio.get_running_loop().create_task(run_lasting(self._run, "rebalancing"))

    def close(self) -> None:
        """Choose none any more."""
        self._task.cancel()

    def is_chosen(self, stream: FleetStream) -> bool:
        """Tell whether it was chosen, and has not left its shard since."""
        return stream in self._chosen

    def discard(self, stream: FleetStream) -> None:
        """Forget a stream that has left its shard, or for which no shard has room."""
        self._chosen.discard(stream)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            before, self._num_tokens = self._num_tokens, {}
            for shard in self._shards.values():
                if shard.ready and shard.load.queued_prompt_tokens:
                    self._look_at(shard, before)

    def _look_at(self, shard: ShardState, num_tokens_before: dict[FleetStream, int]) -> None:
        """Choose the newest of those that wait: not one that the shard may have begun to compute,
        and no more than this client's share, as others move theirs.
        """
        streams, load = self._running(shard), shard.load
        self._num_tokens.update((stream, len(stream.token_ids)) for stream in streams)
        has_target = any(other.ready and has_room(other, shard) for other in self._shards.values())
        if not streams or not has_target:
            return
        stalled = [
            stream
            for stream in streams
            if num_tokens_before.get(stream) == len(stream.token_ids) and not _went_once(stream)
        ]
        num_streams = max(load.running + load.waiting, len(streams))
        share_tokens = load.queued_prompt_tokens * len(streams) / num_streams
        chosen = []
        for stream in reversed(stalled):
            share_tokens -= stream.context_tokens
            if share_tokens < 0:
                break
            chosen.append(stream)
        self._chosen.update(chosen)
        self._put_due(chosen)


def has_room(target: ShardState, left: ShardState) -> bool:
    """Tell whether what waits at one shard should go to another: none waits there for its turn,
    most KV blocks are free, and it has less than half the work.
    """
    if target.load.waiting or target.half_full:
        return False
    there, here = (shard.candidate(LEAST_URGENT).load_tokens for shard in (target, left))
    return 2 * there < here


def _went_once(stream: FleetStream) -> bool:
    """Tell whether a stream was moved before, so that none goes around."""
    return any(attempt.ended_because == REBALANCE for attempt in stream.attempts)
