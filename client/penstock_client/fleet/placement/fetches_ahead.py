"""Fetches the KV blocks of a session before its next turn, if that would go to another shard than
the one that has them, because that one drains or too much waits there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.shard_state import ShardState
from penstock_client.load_balancing.base import Policy
from penstock_proto.errors import PenstockError
from penstock_proto.types import Attempt, GenerationRequest

logger = logging.getLogger(__name__)

# Sessions that are followed, and the tokens of their last turns in all.
_MOST_SESSIONS = 1024
_MOST_TOKENS = 2**20
# Turns that come later are not followed.
_MOST_AHEAD_S = 600.0
# A turn that finds so many fetches under way fetches for itself when it comes.
_AT_ONCE = 2
_FETCH_S = 25.0


class _Expected(NamedTuple):
    """The last turn of a session, the number of its tokens, and the timer of the next one."""

    stream: FleetStream
    num_tokens: int
    timer: asyncio.TimerHandle


class FetchesAhead:
    """Sessions whose last turn has ended. When the next one is likely, the policy is asked where it
    would go. Nothing is remembered of that: the turn itself is placed when it comes.
    """

    def __init__(
        self,
        fitting: Callable[[FleetStream], list[ShardState]],
        policy: Policy,
        observe: Callable[[str, str], None],
    ) -> None:
        """`fitting` lists the shards that may take a stream; `observe` is told of each fetch, and
        whether it succeeded.
        """
        self._fitting = fitting
        self._policy = policy
        self._observe = observe
        self._expected: dict[str, _Expected] = {}
        self._num_tokens = 0
        self._fetches: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Fetch nothing more."""
        for session in list(self._expected):
            self.forget(session)
        for fetch in self._fetches:
            fetch.cancel()

    def follow(self, stream: FleetStream, holder: ShardState, expected_s: float) -> None:
        """Ask where the next turn of a stream's session would go when it is likely. `holder` has
        the blocks of the stream.
        """
        request = stream.request
        self.forget(request.session)
        num_tokens = len(request.output_token_ids) + stream.context_tokens
        is_too_much = self._num_tokens + num_tokens > _MOST_TOKENS
        if not request.session or is_too_much or len(self._expected) >= _MOST_SESSIONS:
            return
        if expected_s <= _MOST_AHEAD_S and not request.images and not request.shard:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(expected_s, self._look, request.session, holder)
            self._expected[request.session] = _Expected(stream, num_tokens, timer)
            self._num_tokens += num_tokens

    def forget(self, session: str) -> None:
        """Follow a session no longer: its next turn has come."""
        expected = self._expected.pop(session, None)
        if expected is not None:
            expected.timer.cancel()
            self._num_tokens -= expected.num_tokens

    def _look(self, session: str, holder: ShardState) -> None:
        stream = self._expected[session].stream
        self.forget(session)
        target = self._target(stream, holder)
        if target is not None and len(self._fetches) < _AT_ONCE:
            fetch = asyncio.get_running_loop().create_task(
                self._fetch(_next_turn(stream), holder, target)
            )
            self._fetches.add(fetch)
            fetch.add_done_callback(self._fetches.discard)

    def _target(self, stream: FleetStream, holder: ShardState) -> ShardState | None:
        """The shard that is to fetch; None if the turn would go to `holder`, or if that engine or
        what it holds is gone.
        """
        made_by = stream.made_by
        if made_by is None or holder.info is None or not (holder.ready or holder.handing_over):
            return None
        if holder.info.instance_id != made_by.instance_id:
            return None
        fitting = {shard.address: shard for shard in self._fitting(stream)}
        if not fitting:
            return None
        request = _next_turn(stream)
        candidates = [shard.candidate(request.priority) for shard in fitting.values()]
        decision = self._policy.peek(candidates, request, request.session)
        target = holder if decision is None else fitting[decision.address]
        can_fetch = target.info is not None and "prefetch" in target.info.capabilities
        return target if target is not holder and can_fetch else None

    async def _fetch(
        self, request: GenerationRequest, holder: ShardState, target: ShardState
    ) -> None:
        info = target.info
        attempt = Attempt(instance_id=info.instance_id if info else "", kv_source=holder.address)
        try:
            await target.client.prefetch(request, attempt, timeout_s=_FETCH_S)
        except PenstockError as error:
            logger.info("%s fetches no KV blocks: %s", target.address, error)
            self._observe("fetched_ahead", "failed")
        else:
            self._observe("fetched_ahead", "done")


def _next_turn(stream: FleetStream) -> GenerationRequest:
    """The known beginning of the next turn's request."""
    request = stream.request
    return GenerationRequest(
        [*request.prompt_token_ids, *request.output_token_ids, *stream.token_ids],
        max_tokens=1,
        objective=request.objective,
        model=request.model,
        tokenizer_hash=request.tokenizer_hash,
        session=request.session,
        adapter=request.adapter,
        adapter_hash=stream.adapter_hash,
        cache_salt=request.cache_salt,
        caller=request.caller,
    )
