"""Makes a request's spans from its record: the HTTP request, its phases in the router, and its
attempts at shards. The shards' own spans are children of the attempts.

Names are OpenTelemetry's where it defines them. Spans have no texts, token ids or keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock_common.tracing.spans import (
    Event,
    Span,
    SpanContext,
    SpanSink,
    Timeline,
    Value,
    begin,
    known,
)
from penstock_proto.types import AttemptRecord
from penstock_router.observe.request_record import RequestRecord

METHOD = "penstock.v1.Shard/Generate"
_HTTP_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/generate": "text_completion",
    "/generate_stream": "text_completion",
}


class RequestTraces:
    def __init__(self, sink: SpanSink | None, share: float = 1.0) -> None:
        """Without a sink, shards get the client's trace context unchanged. With a sink, this
        `share` of the requests without a trace begin one.
        """
        self._sink = sink
        self._share = share

    def begin(self, headers: Sequence[str]) -> tuple[str, str]:
        """Return the traceparent for the shards, and the id of this request's parent span; "" for
        none. `headers` are the client's traceparent headers: if there are several, they are
        ignored.
        """
        given = headers[0] if len(headers) == 1 else ""
        if self._sink is None:
            return (given if SpanContext.parse(given) else ""), ""
        context, parent_span_id = begin(given, self._share)
        return context.traceparent, parent_span_id

    def on_request_end(self, record: RequestRecord) -> None:
        context = SpanContext.parse(record.traceparent)
        if self._sink is not None and context is not None and context.sampled:
            self._sink.add(list(_spans(record, context)))


def _spans(record: RequestRecord, context: SpanContext) -> Iterator[Span]:
    ended_s = record.arrived_s if record.ended_s is None else record.ended_s
    times = Timeline(context, record.arrived_s, round(record.arrived_at * 1e9))
    method = record.method if record.method in _HTTP_METHODS else "_OTHER"
    yield Span(
        name=f"{'HTTP' if method == '_OTHER' else method} {record.route}",
        kind="server",
        context=context,
        parent_id=record.parent_span_id,
        started_ns=times.unix_ns(record.arrived_s),
        ended_ns=times.unix_ns(ended_s),
        attributes=known({"http.request.method": method, **_attributes(record)}),
        error=_error(record),
        events=list(_failovers(record, times)),
    )
    if record.prepared_s is not None:
        yield times.phase("prepare", record.arrived_s, record.prepared_s)
        if record.placed_s is not None:
            yield times.phase("queue", record.prepared_s, record.placed_s)
    for sequence, attempts in enumerate(record.sequences):
        for number, attempt in enumerate(attempts):
            if attempt.span_id:
                where: dict[str, Value | None] = {
                    "penstock.sequence": sequence,
                    "penstock.request.attempt": number,
                }
                yield _attempt(times, attempt, where, ended_s)


def _attempt(
    times: Timeline, attempt: AttemptRecord, where: dict[str, Value | None], ended_s: float
) -> Span:
    context = times.context
    host, _, port = attempt.shard.rpartition(":")
    events = []
    if attempt.first_output_s is not None:
        events.append(Event("first output", times.unix_ns(attempt.first_output_s)))
    return Span(
        name=METHOD,
        kind="client",
        context=SpanContext(context.trace_id, attempt.span_id, context.sampled),
        parent_id=context.span_id,
        started_ns=times.unix_ns(attempt.sent_s),
        ended_ns=times.unix_ns(ended_s if attempt.ended_s is None else attempt.ended_s),
        attributes=known(
            {
                "rpc.system.name": "grpc",
                "rpc.method": METHOD,
                "server.address": host,
                "server.port": int(port),
                "error.type": attempt.ended_because or None,
                "penstock.shard.reason": attempt.reason,
                "penstock.shard.tokens": attempt.num_tokens or None,
                "penstock.shard.cached_tokens": attempt.cached_tokens,
                "penstock.shard.kv_source": attempt.kv_source or None,
                **where,
            }
        ),
        error=attempt.ended_because,
        events=events,
    )


def _failovers(record: RequestRecord, times: Timeline) -> Iterator[Event]:
    for attempts in record.sequences:
        for failed, next_one in pairwise(attempts):
            attributes = {
                "penstock.shard.from": failed.shard,
                "penstock.shard.to": next_one.shard,
                "penstock.failover.reason": failed.ended_because,
            }
            yield Event("failover", times.unix_ns(next_one.sent_s), attributes)


def _attributes(record: RequestRecord) -> dict[str, Value | None]:
    usage, first_s = record.usage, record.first_token_s
    return {
        "http.route": record.route,
        "http.response.status_code": record.status,
        "error.type": _error(record) or None,
        "gen_ai.operation.name": _OPERATIONS.get(record.route),
        "gen_ai.request.model": record.model or None,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.finish_reasons": (
            [record.outcome] if record.outcome in ("stop", "length") else None
        ),
        "gen_ai.response.time_to_first_chunk": (
            None if first_s is None else round(first_s - record.arrived_s, 6)
        ),
        "gen_ai.usage.input_tokens": None if usage is None else usage.prompt_tokens,
        "gen_ai.usage.output_tokens": None if usage is None else usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": None if usage is None else usage.cached_tokens,
        "penstock.request.id": record.request_id,
        "penstock.request.outcome": record.outcome,
        "penstock.key.name": record.key_name or None,
    }


def _error(record: RequestRecord) -> str:
    """Return the span's error: a failure of the server, not a client's mistake."""
    failed = record.status >= 500 or record.outcome == "error"
    return (record.error or record.outcome) if failed else ""
