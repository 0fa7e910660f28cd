"""Records each request of this shard, for log lines and traces.

A record is updated by the request's outputs and passed on at its end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock_common.tracing.spans import SpanContext, begin
from penstock_proto.limits import MAX_ID_CHARACTERS
from penstock_proto.types import Error, FinishReason, RequestOutput, Submission, Work
from penstock_shard.ipc.messages import Load

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class ShardRecord:
    """A request and its progress. `queue_s` is a duration; other times in `_s` are of
    `time.monotonic`. A time is None until it is known.
    """

    request_id: str
    attempt: int
    # The user's own request id.
    label: str
    instance_id: str
    prompt_tokens: int
    # RequestOutput tokens from earlier attempts.
    given_tokens: int
    # The request's span and its parent's id; None and "" without a trace.
    context: SpanContext | None = None
    parent_span_id: str = ""

    # Unix time in ns.
    arrived_ns: int = field(default_factory=time.time_ns)
    arrived_s: float = field(default_factory=time.monotonic)
    # From arrival to first step.
    queue_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    # The engine's load at the first token, and at the end.
    first_load: Load | None = None
    last_load: Load | None = None
    # The reason why the request ended, and its cost, if the engine ended it.
    finish: FinishReason | None = None
    error: Error | None = None
    work: Work | None = None

    @property
    def mean_batch(self) -> float | None:
        """Mean number of sequences in a step while the request decoded."""
        if self.first_load is None or self.last_load is None:
            return None
        steps = self.last_load.steps_total - self.first_load.steps_total
        if steps <= 0:
            return None
        return (self.last_load.sequences_total - self.first_load.sequences_total) / steps


OnEnd = Callable[[ShardRecord], None]


class Follower:
    def __init__(
        self, log: OnEnd | None, trace: OnEnd | None, share: float, load: Callable[[], Load]
    ) -> None:
        """`log` gets every request; `trace` gets requests with a sampled trace. Of the requests
        without a trace, `share` get a sampled one.
        """
        self._log = log
        self._trace = trace
        self._share = share
        self._load = load

    def outlet(
        self, submission: Submission, instance_id: str, deliver: Callable[[RequestOutput], None]
    ) -> Callable[[RequestOutput], None]:
        """Return a callback that records an output and passes it to `deliver`."""
        request = submission.request
        context, parent_span_id = SpanContext.parse(request.traceparent), ""
        if self._trace is not None:
            context, parent_span_id = begin(request.traceparent, self._share)
        listeners = [self._log] if self._log is not None else []
        if self._trace is not None and context is not None and context.sampled:
            listeners.append(self._trace)
        if not listeners:
            return deliver
        record = ShardRecord(
            request_id=submission.request_id[:MAX_ID_CHARACTERS],
            attempt=submission.attempt.number,
            label=request.label[:MAX_ID_CHARACTERS],
            instance_id=instance_id,
            prompt_tokens=len(request.prompt_token_ids),
            given_tokens=len(request.output_token_ids),
            context=context,
            parent_span_id=parent_span_id,
        )

        def take(output: RequestOutput) -> None:
            _note(record, output, self._load)
            deliver(output)
            if output.is_last:
                for listener in listeners:
                    _tell(listener, record)

        return take


def _tell(listener: OnEnd, record: ShardRecord) -> None:
    try:
        listener(record)
    except Exception:  # a failing exporter must not end the task that reads the engine's messages
        logger.exception("request %s: its end could not be told", record.request_id)


def _note(record: ShardRecord, output: RequestOutput, load: Callable[[], Load]) -> None:
    if output.queue_s is not None:
        record.queue_s = output.queue_s
    if output.cached_tokens is not None:
        record.cached_tokens = output.cached_tokens
    if output.token_ids:
        record.output_tokens += len(output.token_ids)
        record.last_token_s = time.monotonic()
        if record.first_token_s is None:
            record.first_token_s, record.first_load = record.last_token_s, load()
    if output.is_last:
        record.ended_s = time.monotonic()
        record.last_load = load()
        record.finish, record.error, record.work = (
            output.finish_reason,
            output.error,
            output.work,
        )
