"""Moves: a stream that is to leave its shard is sent on once its KV blocks are where it goes.

While they are fetched it goes on where it runs; what pauses it then is only the computing of its
last tokens. Whatever fails, it moves all the same, and more of it is computed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.shard_state import ShardState
from penstock_common.clock import Clock
from penstock_common.tasks import run_lasting
from penstock_proto.types import Attempt

logger = logging.getLogger(__name__)

# Of each shard the blocks of so many streams are fetched at once: as many as it serves at once.
_AT_ONCE = 2
# So many tokens are computed in about the time that a fetch of them takes.
_LEAST_TOKENS = 128
# One whose blocks are there moves when its next token comes, or after so long: what it computes in
# between is not lost.
_NEXT_TOKEN_S = 0.25
# A stream that has waited for so long moves without its blocks: its shard waits for 30 s, if not
# told otherwise.
_MOST_S = 25.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The place a stream is to go to: the shard, why it was chosen, where its KV blocks are, and
    how many of its tokens the shard holds.
    """

    shard: ShardState
    reason: str
    kv_source: str
    held_tokens: int = 0

    @property
    def can_prefetch(self) -> bool:
        """Tell whether the shard can be told to fetch."""
        info = self.shard.info
        return bool(self.kv_source) and info is not None and "prefetch" in info.capabilities


class Moves:
    """Streams whose blocks go before them. Decides nothing of where to."""

    def __init__(
        self,
        plan: Callable[[FleetStream], Plan | None],
        put_due: Callable[[Iterable[FleetStream]], None],
        clock: Clock,
    ) -> None:
        """`plan` says where a stream would go now; `put_due` is called with a stream that may be
        sent on.
        """
        self._plan = plan
        self._put_due = put_due
        self._clock = clock
        # By the address of the shard that they leave, those whose blocks are not asked for yet, in
        # the order in which they came, and until when they wait.
        self._waiting: dict[str, dict[FleetStream, float]] = {}
        # For each address how many tasks take from there.
        self._num_movers: Counter[str] = Counter()
        self._movers: set[asyncio.Task[None]] = set()
        self._calls: dict[FleetStream, asyncio.Task[int]] = {}
        # Those that wait no more, and where their blocks are; None: nowhere.
        self._ready: dict[FleetStream, ShardState | None] = {}
        # Of these, those that move at their next token.
        self._arrived: set[FleetStream] = set()

    def close(self) -> None:
        """Fetch nothing more."""
        for mover in self._movers:
            mover.cancel()

    def hold(self, stream: FleetStream, plan: Plan) -> bool:
        """Tell whether a stream waits until its blocks are where it goes."""
        if stream in self._ready:
            return False
        if stream in self._calls or stream in self._waiting.get(_address(stream), ()):
            return True
        if not plan.can_prefetch or stream.context_tokens < _LEAST_TOKENS:
            return False
        waiting = self._waiting.setdefault(_address(stream), {})
        waiting[stream] = self._clock() + _MOST_S
        self._start_mover(_address(stream))
        return True

    def on_output(self, stream: FleetStream) -> None:
        """A stream has a token more. Called for each: keep it cheap."""
        if stream in self._arrived:
            self._arrived.discard(stream)
            self._put_due([stream])

    def target(self, stream: FleetStream) -> ShardState | None:
        """The shard that has the blocks of a stream, if one was told to fetch them."""
        return self._ready.get(stream)

    def discard(self, stream: FleetStream) -> None:
        """Forget a stream that leaves its shard."""
        self._ready.pop(stream, None)
        self._arrived.discard(stream)
        self._waiting.get(_address(stream), {}).pop(stream, None)
        if (call := self._calls.get(stream)) is not None:
            call.cancel()

    def _start_mover(self, address: str) -> None:
        if self._num_movers[address] >= _AT_ONCE:
            return
        self._num_movers[address] += 1
        moving = run_lasting(lambda: self._move_all(address), "moving requests", pause_s=0.0)
        mover = asyncio.get_running_loop().create_task(moving)
        self._movers.add(mover)
        mover.add_done_callback(self._movers.discard)

    async def _move_all(self, address: str) -> None:
        while waiting := self._waiting.get(address):
            stream = next(iter(waiting))
            until_s = waiting.pop(stream)
            target = await self._prefetch(stream, until_s - self._clock())
            if _address(stream) == address:
                self._ready[stream] = target
                if target is None:
                    self._put_due([stream])
                else:
                    self._arrived.add(stream)
                    loop = asyncio.get_running_loop()
                    loop.call_later(_NEXT_TOKEN_S, self._put_due, [stream])
            # Many may move at once, without anything that was waited for.
            await asyncio.sleep(0)
        # In the turn in which nobody waits: who comes after it starts another.
        self._waiting.pop(address, None)
        self._num_movers[address] -= 1
        if not self._num_movers[address]:
            del self._num_movers[address]

    async def _prefetch(self, stream: FleetStream, timeout_s: float) -> ShardState | None:
        """The shard that has most of the stream's blocks now; None if none has."""
        plan = self._plan(stream)
        if plan is None or not plan.can_prefetch or timeout_s <= 0:
            return None
        info = plan.shard.info
        attempt = Attempt(
            instance_id=info.instance_id if info else "",
            kv_source=plan.kv_source,
            left_s=stream.left_s(self._clock()),
        )
        asking = plan.shard.client.prefetch(stream.request_now(), attempt, timeout_s=timeout_s)
        call = self._calls[stream] = asyncio.ensure_future(asking)
        try:
            await asyncio.wait({call})
        finally:
            del self._calls[stream]
            call.cancel()
        if call.cancelled():
            return None
        if (error := call.exception()) is not None:
            logger.info("%s fetches no KV blocks: %s", plan.shard.address, error)
            return None
        return plan.shard if 2 * call.result() >= stream.context_tokens else None


def _address(stream: FleetStream) -> str:
    """The address of the shard where it runs; empty if it runs on none."""
    return "" if stream.shard is None else stream.shard.address
