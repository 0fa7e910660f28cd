"""Records what became of each request: filled in along the way, passed to listeners at its end.

The request log, metrics, spans and the console's time line are all made from it, so they cannot
disagree. A record ends when its last holder releases it: an answer that is made in the background,
or for a client that may resume, outlives the HTTP request that asked for it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock_client.types import AttemptRecord

logger = logging.getLogger(__name__)

# How many of a request's sequences are recorded; there may be thousands.
_NUM_SEQUENCES = 16


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None
    # How many completion tokens are reasoning; None if it is not separated from content.
    reasoning_tokens: int | None = None
    # From arrival at a shard to the first step there: the longest of all sequences.
    queue_s: float | None = None
    # A sequence went on at a shard with other numerics, whose tokens may differ at a near-tie.
    approximate: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """A request and what happened to it. Times with `_s` are `time.perf_counter`'s; None: not yet.

    Kept for a while after its end: it must refer to nothing large.
    """

    request_id: str
    method: str
    # The route's path pattern, with names of variables; "unknown" if no route matched.
    route: str
    arrived_s: float
    # Unix time.
    arrived_at: float = field(default_factory=time.time)
    # W3C trace context of this request's span, and its parent's id: "" without either.
    traceparent: str = ""
    parent_span_id: str = ""
    # The name of the key it showed.
    key_name: str = ""
    # The address that it came from; "" where that is not to be logged.
    client: str = ""
    model: str = ""
    # The adapter that it named in place of the model; "" for none.
    adapter: str = ""
    stream: bool = False
    # What it asks for, once its prompts are ready: choices of each, and tokens of each at most.
    choices: int | None = None
    max_tokens: int | None = None

    # When it was admitted, when its prompts were ready, and when it had all its places.
    admitted_s: float | None = None
    prepared_s: float | None = None
    placed_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    # Updated while the answer is made; None before.
    usage: Usage | None = None
    # How many tokens shards made for it, counted as each sequence ends: also those that were made
    # once more, and those that nobody took.
    made_tokens: int = 0
    # For each of its first `_NUM_SEQUENCES` sequences: the attempts, in order.
    sequences: list[Sequence[AttemptRecord]] = field(default_factory=list)
    # Seconds from the last token of one shard to the first of the next, for each failover.
    failover_gaps_s: list[float] = field(default_factory=list)

    # The status of its answer; of a stream that failed midway still 200. 499: the client left
    # before its end.
    status: int = 0
    # stop, length; disconnect, slow_reader, timeout, shutdown, abandoned: why it was aborted;
    # refused, error; ok for requests that generate nothing; probe for open routes. "": it runs.
    outcome: str = ""
    # The type of the error that it ended in, and the field at fault; never a value from a request.
    error: str = ""
    _holders: int = 0

    @property
    def attempts(self) -> Iterator[AttemptRecord]:
        """The attempts of all recorded sequences."""
        return itertools.chain.from_iterable(self.sequences)

    @property
    def output_tokens(self) -> int:
        """The number of output tokens so far."""
        return 0 if self.usage is None else self.usage.completion_tokens

    def follow(self, attempts: Sequence[AttemptRecord]) -> None:
        """Record the attempts of one more sequence."""
        if len(self.sequences) < _NUM_SEQUENCES:
            self.sequences.append(attempts)

    def record_error(self, error: str, field: str | None, model: str) -> None:
        """Set the error that the client got, and the model that was asked for, where it is known
        and nothing was made ready for it; the outcome follows from the status.
        """
        self.error = self.error or (f"{error}: {field}" if field else error)
        self.model = self.model or model

    def record_outcome(self, outcome: str, error: str = "") -> None:
        """Set how it ended; only the first call counts."""
        if not self.outcome:
            self.outcome, self.error = outcome, self.error or error


def outcome_of(status: int) -> str:
    """The outcome of a request of which only the HTTP status is known."""
    if status < 400:
        return "ok"
    if status == 499:
        return "disconnect"
    if status == 504:
        return "timeout"
    return "refused" if status < 500 else "error"


class Records:
    """Running requests, and the listeners to their ends."""

    def __init__(self) -> None:
        self.running: dict[RequestRecord, None] = {}
        # Called with every record that has ended; they must be quick.
        self.on_end: list[Callable[[RequestRecord], None]] = []

    @contextmanager
    def track(self, record: RequestRecord) -> Iterator[RequestRecord]:
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
        record.record_outcome(outcome_of(record.status))
        for listener in self.on_end:
            try:
                listener(record)
            except Exception:  # a failing listener must not fail the request
                logger.exception("request %s: its end could not be told", record.request_id)
