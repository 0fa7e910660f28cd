"""Makes a request's trace spans: its own, with children for queue, prefill and decode.

Attributes have OpenTelemetry's names where those exist. Spans never contain token ids.
"""

from __future__ import annotations

from penstock_common.tracing.spans import Span, SpanSink, Timeline, Value, known
from penstock_proto import codec
from penstock_shard.server.observe.request_record import ShardRecord

METHOD = f"{codec.SERVICE_NAME}/Generate"


def trace_request(sink: SpanSink, record: ShardRecord) -> None:
    sink.add(spans_of(record))


def spans_of(record: ShardRecord) -> list[Span]:
    """Return the request's span, and a child for each phase that it reached."""
    assert record.context is not None
    assert record.ended_s is not None
    times = Timeline(record.context, record.arrived_s, record.arrived_ns)
    whole = Span(
        name=METHOD,
        kind="server",
        context=record.context,
        parent_id=record.parent_span_id,
        started_ns=record.arrived_ns,
        ended_ns=times.unix_ns(record.ended_s),
        attributes=_attributes(record),
        error=_error(record),
    )
    began_s = None if record.queue_s is None else record.arrived_s + record.queue_s
    ends_s = (record.arrived_s, began_s, record.first_token_s, record.last_token_s)
    phases = zip(("queue", "prefill", "decode"), ends_s, ends_s[1:], strict=False)
    return [
        whole,
        *(
            times.phase(name, begin_s, record.ended_s if end_s is None else end_s)
            for name, begin_s, end_s in phases
            if begin_s is not None
        ),
    ]


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
    return known(given)


def _error(record: ShardRecord) -> str:
    """Return the error's gRPC status, or ""; not the message, which may quote the request."""
    return "" if record.error is None else codec.status(record.error).name
