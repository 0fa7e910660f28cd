"""What became of each request: one record, filled in by those who know, told to whoever listens.

The request log, metrics, spans and the console's time line are all made of it, so they cannot tell
different stories. A record ends when nobody holds it any more: an answer that is made in the
background, or for a client that will come back, outlives the HTTP request that asked for it. Knows
no HTTP, and of texts and tokens their number only.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock_client.types import AttemptRecord
from penstock_router.deltas import Usage

logger = logging.getLogger(__name__)

# Of one request's sequences so many are followed; there may be thousands.
_NUM_SEQUENCES = 16


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """A request and what happened to it. Times with `_s` are `time.perf_counter`'s; None: not yet.

    Kept for a while after its end: it must refer to nothing large.
    """

    request_id: str
    method: str
    # As the route's path is written, with its variables' names; "unknown" for none.
    route: str
    arrived_s: float
    # Unix time.
    arrived_at: float = field(default_factory=time.time)
    # W3C trace context of this request's span, and its parent's id: "" without either.
    traceparent: str = ""
    parent_span_id: str = ""
    # Whose key it showed.
    key_name: str = ""
    model: str = ""
    # That it named in place of the model; "" for none.
    adapter: str = ""
    stream: bool = False

    # It was let in, its prompts were ready, and it had all its places.
    admitted_s: float | None = None
    prepared_s: float | None = None
    placed_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    # Counts on while the answer is made; None before.
    usage: Usage | None = None
    # Of each of its sequences (the first few): the attempts, in their order.
    sequences: list[Sequence[AttemptRecord]] = field(default_factory=list)
    # Without tokens, from one shard's last to the next one's first.
    failover_gaps_s: list[float] = field(default_factory=list)

    # The status of its answer; of a stream that failed midway still 200. 499: the client left
    # before its end.
    status: int = 0
    # stop, length; disconnect, slow_reader, timeout, shutdown, abandoned: why it was cut short;
    # refused, error; ok where there are no tokens to tell of; probe of what anybody may ask, as
    # often as they like. "": still runs.
    outcome: str = ""
    # The type of the error that it ended in, and the field at fault; never a value from a request.
    error: str = ""
    _holders: int = 0

    @property
    def attempts(self) -> Iterator[AttemptRecord]:
        """At all its shards."""
        return itertools.chain.from_iterable(self.sequences)

    @property
    def output_tokens(self) -> int:
        """So far."""
        return 0 if self.usage is None else self.usage.completion_tokens

    def follow(self, attempts: Sequence[AttemptRecord]) -> None:
        """One more sequence."""
        if len(self.sequences) < _NUM_SEQUENCES:
            self.sequences.append(attempts)

    def failed(self, error: str, field: str | None) -> None:
        """What its client was told; the outcome is its status's."""
        self.error = self.error or (f"{error}: {field}" if field else error)

    def finished(self, outcome: str, error: str = "") -> None:
        """How it ended; what is said first counts."""
        if not self.outcome:
            self.outcome, self.error = outcome, self.error or error


def outcome_of(status: int) -> str:
    """Where nothing but its answer tells."""
    if status < 400:
        return "ok"
    if status == 499:
        return "disconnect"
    if status == 504:
        return "timeout"
    return "refused" if status < 500 else "error"


class Records:
    """Requests that run, and who is told of their ends."""

    def __init__(self) -> None:
        self.running: dict[RequestRecord, None] = {}
        # Each is told of every record that has ended; they must be quick.
        self.on_end: list[Callable[[RequestRecord], None]] = []

    @contextmanager
    def held(self, record: RequestRecord) -> Iterator[RequestRecord]:
        """The record runs at least until this scope is left."""
        record._holders += 1
        self.running[record] = None
        try:
            yield record
        finally:
            record._holders -= 1
            if not record._holders:
                self._end(record)

    def _end(self, record: RequestRecord) -> None:
        del self.running[record]
        record.ended_s = time.perf_counter()
        record.finished(outcome_of(record.status))
        for listener in self.on_end:
            try:
                listener(record)
            except Exception:
                # What only tells of requests must not cost one.
                logger.exception("request %s: its end could not be told", record.request_id)
