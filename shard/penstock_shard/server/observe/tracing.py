"""Makes a request's trace spans: its own, with children for queue, prefill and decode.

Attributes have OpenTelemetry's names where those exist. Spans never contain token ids.
"""

from __future__ import annotations

from penstock_common.tracing.spans import Span, SpanSink, Value
from penstock_proto import codec
from penstock_shard.server.observe.request_record import ShardRecord

METHOD = f"{codec.SERVICE_NAME}/Generate"
_NS = 1_000_000_000


def trace_request(sink: SpanSink, record: ShardRecord) -> None:
    sink.add(spans_of(record))


def spans_of(record: ShardRecord) -> list[Span]:
    """Return the request's span, and a child for each phase that it reached."""
    assert record.context is not None
    assert record.ended_s is not None
    whole = Span(
        name=METHOD,
        kind="server",
        context=record.context,
        parent_id=record.parent_span_id,
        started_ns=record.arrived_ns,
        ended_ns=_unix_ns(record, record.ended_s),
        attributes=_attributes(record),
        error=_error(record),
    )
    began_s = None if record.queue_s is None else record.arrived_s + record.queue_s
    first_s, last_s = record.first_token_s, record.last_token_s
    spans = [whole, _child(record, "queue", record.arrived_s, began_s)]
    if began_s is not None:
        spans.append(_child(record, "prefill", began_s, first_s))
    if first_s is not None:
        spans.append(_child(record, "decode", first_s, last_s))
    return spans


def _child(record: ShardRecord, name: str, begin_s: float, end_s: float | None) -> Span:
    assert record.context is not None
    assert record.ended_s is not None
    return Span(
        name=name,
        context=record.context.child(),
        parent_id=record.context.span_id,
        started_ns=_unix_ns(record, begin_s),
        ended_ns=_unix_ns(record, record.ended_s if end_s is None else end_s),
    )


def _unix_ns(record: ShardRecord, monotonic_s: float) -> int:
    return record.arrived_ns + round((monotonic_s - record.arrived_s) * _NS)


def _attributes(record: ShardRecord) -> dict[str, Value]:
    given: dict[str, Value | None] = {
        "rpc.system.name": "grpc",
        "rpc.method": METHOD,
        "rpc.response.status_code": "OK" if record.error is None else _error(record),
        "error.type": _error(record) or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.response.finish_reasons": None if record.finish is None else [record.finish.value],
        "penstock.request.id": record.request_id,
        "penstock.request.label": record.label or None,
        "penstock.request.attempt": record.attempt,
        "penstock.request.given_tokens": record.given_tokens,
        "penstock.engine.instance_id": record.instance_id,
        "penstock.engine.steps": None if record.work is None else record.work.steps,
        "penstock.engine.preemptions": None if record.work is None else record.work.preemptions,
        "penstock.engine.mean_batch": record.mean_batch,
    }
    return {name: value for name, value in given.items() if value is not None}


def _error(record: ShardRecord) -> str:
    """Return the error's gRPC status, or ""; not the message, which may quote the request."""
    return "" if record.error is None else codec.status(record.error).name
