"""Records what happens to each request, and passes the record to listeners at its end.

The request log, metrics, spans and the console's time line use the same record, so they agree. A
record ends when its last holder releases it: an answer in the background, or for a client that may
resume, outlives its HTTP request.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock_proto.types import AttemptRecord

logger = logging.getLogger(__name__)

# A request may have thousands of sequences; only the first are recorded.
_NUM_SEQUENCES = 16


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request. A prompt counts once, even with several choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None
    # Completion tokens that are reasoning; None if it is not separated from content.
    reasoning_tokens: int | None = None
    # Time from arrival at a shard to the first step there: the maximum over the sequences.
    queue_s: float | None = None
    # True if a sequence continued on a shard with other numerics, where tokens may differ at
    # near-ties.
    approximate: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """A request and its events. Times in `_s` are `time.perf_counter`'s; None: not yet.

    Kept for a while after its end, so it must not refer to anything large.
    """

    request_id: str
    method: str
    # The route's path pattern, with names of variables; "unknown" if no route matched.
    route: str
    arrived_s: float
    # Unix time.
    arrived_at: float = field(default_factory=time.time)
    # The W3C trace context of this request's span, and its parent's id; "" without them.
    traceparent: str = ""
    parent_span_id: str = ""
    key_name: str = ""
    # The client's address; "" if it must not be logged.
    client: str = ""
    model: str = ""
    # The adapter that was named instead of the model; "" for none.
    adapter: str = ""
    # The client's name for the session; "" for none.
    session: str = ""
    stream: bool = False
    # The number of choices of each prompt, and a choice's maximum of tokens, once the prompts are
    # ready.
    choices: int | None = None
    max_tokens: int | None = None

    # The times when the request was admitted, prepared, and given its places.
    admitted_s: float | None = None
    prepared_s: float | None = None
    placed_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    # Updated while the answer is generated; None before.
    usage: Usage | None = None
    # Tokens that shards generated, counted when each sequence ends. They include tokens generated
    # again and tokens that nobody read.
    made_tokens: int = 0
    # The attempts, in order, of each of the first `_NUM_SEQUENCES` sequences.
    sequences: list[Sequence[AttemptRecord]] = field(default_factory=list)
    # For each failover, the seconds from one shard's last token to the next one's first.
    failover_gaps_s: list[float] = field(default_factory=list)
    # Seconds for which a shard was asked to retain the KV blocks; None: not asked.
    retained_s: float | None = None

    # The answer's HTTP status; 200 also for a stream that failed midway. 499: the client left
    # before the end.
    status: int = 0
    # stop, length, refused or error; for an abort, its reason: disconnect, slow_reader, timeout,
    # shutdown or abandoned; ok for requests that generate nothing; probe for open routes; "": not
    # ended.
    outcome: str = ""
    # The error's type and the field at fault; never a value from a request.
    error: str = ""
    _holders: int = 0

    @property
    def attempts(self) -> Iterator[AttemptRecord]:
        return itertools.chain.from_iterable(self.sequences)

    @property
    def output_tokens(self) -> int:
        return 0 if self.usage is None else self.usage.completion_tokens

    def follow(self, attempts: Sequence[AttemptRecord]) -> None:
        if len(self.sequences) < _NUM_SEQUENCES:
            self.sequences.append(attempts)

    def record_error(self, error: str, field: str | None, model: str) -> None:
        """Set the error that the client got, and the model if it is not set yet. The outcome
        follows from the status.
        """
        self.error = self.error or (f"{error}: {field}" if field else error)
        self.model = self.model or model

    def record_outcome(self, outcome: str, error: str = "") -> None:
        """Set the outcome, unless it is already set."""
        if not self.outcome:
            self.outcome, self.error = outcome, self.error or error


def outcome_of(status: int) -> str:
    """Return a request's outcome by its HTTP status, if nothing else is known."""
    if status < 400:
        return "ok"
    if status == 499:
        return "disconnect"
    if status == 504:
        return "timeout"
    return "refused" if status < 500 else "error"


class Records:
    def __init__(self) -> None:
        self.running: dict[RequestRecord, None] = {}
        # Listeners, called with every ended record. They must be quick.
        self.on_end: list[Callable[[RequestRecord], None]] = []

    @contextmanager
    def track(self, record: RequestRecord) -> Iterator[RequestRecord]:
        """Keep the record running at least within this scope."""
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
        record.record_outcome(outcome_of(record.status))
        for listener in self.on_end:
            try:
                listener(record)
            except Exception:  # a failing listener must not fail the request
                logger.exception("request %s: its end could not be told", record.request_id)
