"""A sequence as its reader sees it, whichever shards it runs on, and the state of its attempts.

`failover.py` sends it and sends it on; this only keeps the state for that.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock_client.fleet.compatibility import complete_request
from penstock_client.fleet.poison_requests import SUSPECT_DEATHS, fingerprint
from penstock_client.fleet.shard_state import ShardState
from penstock_client.rpc.generation_stream import GenerationStream
from penstock_common.back_off import BackOff
from penstock_proto.errors import PenstockError
from penstock_proto.facts import ShardInfo
from penstock_proto.types import FinishReason, GenerationRequest, Output, PixelSource

_FIRST_BACK_OFF_S = 0.05
_MAX_BACK_OFF_S = 1.0


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class FleetStream(GenerationStream):
    """The stream of a request that may change shards. Iterate it like any `GenerationStream`."""

    request: GenerationRequest
    # Called when a shard sent an output, and when one failed the request.
    _on_arrival: Callable[[FleetStream, Output], None]
    _on_failure: Callable[[FleetStream, PenstockError], None]
    # By the clock that all its times are of; None: no limit.
    deadline_s: float | None
    # Of its images; None: of a request that has none.
    pixels: PixelSource | None = None
    _kind: bytes = b""
    # The output so far, from all shards.
    token_ids: list[int] = field(default_factory=list)
    # The shard where it runs, and the info of that shard's engine; None while it waits.
    shard: ShardState | None = None
    info: ShardInfo | None = None
    # The engine that made its latest tokens, or log-probabilities of its prompt; and the one that
    # made its first, whose defaults hold for all.
    made_by: ShardInfo | None = None
    begun_by: ShardInfo | None = None
    # How it ended; both None if its reader left.
    finish_reason: FinishReason | None = None
    final_error: PenstockError | None = None
    # `len(token_ids)` when the current attempt began.
    taken_up_at: int = 0
    # How many engines died while it ran in them, since it last got past such a point.
    engine_deaths: int = 0
    # A shard that had taken it became unavailable.
    was_dropped: bool = False
    attempts_in_vain: int = 0
    # Instance ids of engines that failed it lately.
    avoided: set[str] = field(default_factory=set)
    back_off: BackOff = field(default_factory=lambda: BackOff(_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S))
    last_error: PenstockError | None = None
    timer: asyncio.TimerHandle | None = None
    # How long it waited since its last token, for a shard or in the queue of a full one; and when
    # it began to wait for a shard, or in its queue.
    waited_s: float = 0.0
    waiting_since_s: float = 0.0

    @property
    def is_suspect(self) -> bool:
        """Tell whether so many engines died while it ran that it is tried alone."""
        return self.engine_deaths >= SUSPECT_DEATHS

    @property
    def context_tokens(self) -> int:
        """The number of tokens that prompt and output have so far."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    @property
    def kind(self) -> bytes:
        """A fingerprint: equal for requests that make an engine do the same."""
        if not self._kind:
            self._kind = fingerprint(self.request)
        return self._kind

    @property
    def adapter_hash(self) -> str:
        """The content hash its adapter must have: once it has tokens, that of the adapter that made
        them; "" if any will do.
        """
        if self.request.adapter_hash or self.made_by is None:
            return self.request.adapter_hash
        return self.made_by.adapter_hash(self.request.adapter)

    def request_now(self) -> GenerationRequest:
        """Return the request with its output so far, and with the defaults of the shard that began
        it.
        """
        if self.begun_by is None:
            return self.request
        output_token_ids = [*self.request.output_token_ids, *self.token_ids]
        request = complete_request(self.request, self.begun_by)
        return dataclasses.replace(request, output_token_ids=output_token_ids)

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds until the deadline, at least 0.001; None without a deadline."""
        return None if self.deadline_s is None else max(0.001, self.deadline_s - now_s)

    def feed(self, output: Output) -> None:
        """Take an output of a shard."""
        if self._ended or not self._accept(output):
            return
        # `_accept` has cut off tokens that were known.
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self._on_arrival(self, output)
        # Last, because the reader may cancel the stream here.
        self._tell()

    def fail(self, error: PenstockError) -> None:
        """The shard failed it: go on elsewhere, or end."""
        if not self.ended:
            self._on_failure(self, error)

    def end(self, error: PenstockError) -> None:
        """End with an error; try no other shard."""
        self.final_error = error
        GenerationStream.fail(self, error)
