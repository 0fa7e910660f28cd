"""Computes a sampled share of requests again on a second shard, and compares the tokens.

Equal numerics promise equal tokens; a shard whose tokens differ has a fault that nothing else shows
(damaged memory, a wrong build).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Mapping

from penstock_client.fleet.compatibility import complete_request, same_adapter, same_numerics
from penstock_client.fleet.failover import Observe
from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.shard_state import ShardState
from penstock_proto.errors import PenstockError
from penstock_proto.types import FinishReason, GenerationRequest, Objective, PixelSource

logger = logging.getLogger(__name__)

# More at a time would load the shards; requests that end meanwhile are not verified.
_MAX_AT_ONCE = 4
# A low priority, behind all other requests.
_PRIORITY = 1000


class Verification:
    """Computes some of a fleet's requests again."""

    def __init__(
        self,
        share: float,
        shards: Mapping[str, ShardState],
        submit: Callable[[GenerationRequest, PixelSource | None], FleetStream],
        observe: Observe,
    ) -> None:
        """`share` is the share of requests to verify, 0 to 1. Raises `ValueError` for another."""
        if not 0 <= share <= 1:
            raise ValueError(f"verify_share: {share} is out of bounds; 0 to 1")
        self._share = share
        self._shards = shards
        self._submit = submit
        self._observe = observe
        self._tasks: set[asyncio.Task[None]] = set()
        # Ids of requests sent from here, which are not verified in turn.
        self._ours: set[str] = set()

    def owns(self, stream: FleetStream) -> bool:
        """Tell whether the stream is one that verifies, not a caller's."""
        return stream.request_id in self._ours

    def on_stream_end(self, stream: FleetStream) -> None:
        """A request of the fleet has ended."""
        if not self._share or random.random() >= self._share or len(self._tasks) >= _MAX_AT_ONCE:
            return
        finished = stream.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if finished and not stream.approximate and not self.owns(stream):
            second = self._second(stream)
            if second is not None:
                task = asyncio.get_running_loop().create_task(self._verify(stream, second))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel running verifications."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _second(self, stream: FleetStream) -> str | None:
        """The address of another shard with the same numerics."""
        made_by = stream.made_by
        if made_by is None:
            return None
        for shard in self._shards.values():
            info = shard.info
            if (
                shard.ready
                and info is not None
                and info.instance_id != made_by.instance_id
                and same_numerics(info, made_by)
                and same_adapter(made_by, info, stream.request.adapter)
            ):
                return shard.address
        return None

    async def _verify(self, stream: FleetStream, second: str) -> None:
        assert stream.made_by is not None
        assert stream.begun_by is not None
        request = dataclasses.replace(
            complete_request(stream.request, stream.begun_by),
            shard=second,
            exact=True,
            objective=Objective(priority=_PRIORITY),
            logprobs=None,
            prompt_logprobs=None,
            logprob_token_ids=(),
        )
        try:
            again = self._submit(request, stream.pixels)
            self._ours.add(again.request_id)
            try:
                async with again:
                    async for _ in again:
                        pass
            finally:
                self._ours.discard(again.request_id)
        except PenstockError as error:
            self._observe("verified", "failed")
            logger.debug("request %s was not verified: %s", stream.request_id, error)
            return
        if again.token_ids == stream.token_ids:
            self._observe("verified", "equal")
            return
        self._observe("verified", "different")
        logger.error(
            "request %s: shards %s and %s have the same numerics and gave different tokens from "
            "position %d on: one of them computes wrongly",
            stream.request_id,
            stream.made_by.address,
            second,
            _first_difference(stream.token_ids, again.token_ids),
        )


def _first_difference(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    common = min(len(first), len(second))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), common)
