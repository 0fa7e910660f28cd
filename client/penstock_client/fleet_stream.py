"""One sequence as its reader sees it, whichever shards it runs on, and what is known of its way.

`continuation.py` sends it and sends it on; this only keeps what that needs to know.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from penstock_client.errors import PenstockError
from penstock_client.shard_client import new_request_id
from penstock_client.shard_state import ShardState
from penstock_client.stream import GenerationStream
from penstock_client.suspects import SUSPECT_DEATHS, fingerprint
from penstock_client.types import (
    FinishReason,
    GenerationRequest,
    Output,
    ShardInfo,
)

FIRST_BACK_OFF_S = 0.05


class Keeper(Protocol):
    """Whoever sends a stream's request, and is told what comes of it."""

    def fed(self, stream: FleetStream, output: Output) -> None:
        """A shard gave something."""

    def failed(self, stream: FleetStream, error: PenstockError) -> None:
        """A shard dropped the request."""

    def cancelled(self, stream: GenerationStream) -> None:
        """Its reader left."""


class FleetStream(GenerationStream):
    """The stream of a request that may change shards. Iterate it as any `GenerationStream`."""

    __slots__ = (
        "_keeper",
        "_kind",
        "attempts_in_vain",
        "avoided",
        "back_off_s",
        "deadline_s",
        "engine_deaths",
        "final_error",
        "finish_reason",
        "info",
        "last_error",
        "made_by",
        "request",
        "shard",
        "taken_up_at",
        "timer",
        "token_ids",
        "waited_s",
        "waiting_since_s",
        "was_dropped",
    )

    def __init__(self, request: GenerationRequest, keeper: Keeper) -> None:
        given = len(request.output_token_ids)
        super().__init__(new_request_id(), -1, given, keeper.cancelled)
        self._keeper = keeper
        self._kind = b""
        self.request = request
        # What shards gave so far.
        self.token_ids: list[int] = []
        # Where it runs, and what that engine said of itself; None while it waits.
        self.shard: ShardState | None = None
        self.info: ShardInfo | None = None
        # What gave the last of its tokens, or of its prompt's log-probabilities.
        self.made_by: ShardInfo | None = None
        # How it ended; neither, where its reader left.
        self.finish_reason: FinishReason | None = None
        self.final_error: PenstockError | None = None
        # How many of its tokens were there when this attempt began.
        self.taken_up_at = 0
        # Engines that died while it ran in them, and since then none in which it went on.
        self.engine_deaths = 0
        # A shard that had taken it failed it.
        self.was_dropped = False
        self.attempts_in_vain = 0
        # Engines that failed it lately, by instance id.
        self.avoided: set[str] = set()
        self.back_off_s = FIRST_BACK_OFF_S
        self.last_error: PenstockError | None = None
        self.timer: asyncio.TimerHandle | None = None
        # Since it last got something: how long it was on no shard, or on one that had no room for
        # it; since when it is on none now.
        self.waited_s = 0.0
        self.waiting_since_s = 0.0
        limit_s = request.objective.deadline_s
        self.deadline_s = None if limit_s is None else time.monotonic() + limit_s

    @property
    def is_suspect(self) -> bool:
        """It was running in so many engines that died that it is tried alone."""
        return self.engine_deaths >= SUSPECT_DEATHS

    @property
    def kind(self) -> bytes:
        """The same for requests that make an engine do the same."""
        if not self._kind:
            self._kind = fingerprint(self.request)
        return self._kind

    @property
    def adapter_hash(self) -> str:
        """Of what content its adapter must be: once it has tokens, that which made them."""
        if self.request.adapter_hash or self.made_by is None:
            return self.request.adapter_hash
        return self.made_by.adapter_hash(self.request.adapter)

    def feed(self, output: Output) -> None:
        """Take what a shard sent."""
        if self._ended or not self._accept(output):
            return
        # What was known is cut off by now.
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self._keeper.fed(self, output)
        # Last: its reader may cancel it.
        self._tell()

    def fail(self, error: PenstockError) -> None:
        """Go on elsewhere, or end."""
        if not self.ended:
            self._keeper.failed(self, error)

    def end(self, error: PenstockError) -> None:
        """End with an error, whatever might still be tried."""
        self.final_error = error
        super().fail(error)
