"""Sends spans to an OTLP receiver, in bounded batches from OpenTelemetry's thread.

OpenTelemetry reads its own variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE,
OTEL_RESOURCE_ATTRIBUTES and others).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from penstock_common.tracing.spans import Span
from penstock_common.version import VERSION

# A few megabytes: the spans of one second at some thousand requests per second.
_MAX_WAITING_SPANS = 16_384
_BATCH_SPANS = 256
_BATCH_EVERY_MS = 1000.0
_REPORT_EVERY_S = 60.0
_LAST_WORDS_S = 2.0
_KINDS = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_FLAGS = TraceFlags(TraceFlags.SAMPLED)


class OtlpSink:
    def __init__(self, url: str, service: str, exporter: SpanExporter | None = None) -> None:
        """`exporter` replaces OpenTelemetry's in tests."""
        # Let the exporter log only once a minute.
        logging.getLogger(trace_exporter.__name__).addFilter(_OnceInAWhile())
        self._batches = BatchSpanProcessor(
            exporter or trace_exporter.OTLPSpanExporter(endpoint=url),
            max_queue_size=_MAX_WAITING_SPANS,
            schedule_delay_millis=_BATCH_EVERY_MS,
            max_export_batch_size=_BATCH_SPANS,
        )
        self._resource = _resource(service)
        self._scope = InstrumentationScope("penstock", VERSION)

    def add(self, spans: Sequence[Span]) -> None:
        """Never wait; lose the oldest spans if too many wait."""
        for span in spans:
            self._batches.on_end(self._exportable(span))

    def close(self) -> None:
        """Send the remaining spans, within a bounded time."""
        # `shutdown` itself may wait for half a minute.
        ending = threading.Thread(target=self._batches.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST_WORDS_S)

    def _exportable(self, span: Span) -> sdk.ReadableSpan:
        context = span.context
        trace_id = int(context.trace_id, 16)
        parent = None
        if span.parent_id:
            is_remote = span.kind == "server"
            parent = SpanContext(trace_id, int(span.parent_id, 16), is_remote, _FLAGS)
        return sdk.ReadableSpan(
            span.name,
            context=SpanContext(trace_id, int(context.span_id, 16), False, _FLAGS),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[sdk.Event(each.name, each.attributes, each.at_ns) for each in span.events],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.started_ns,
            end_time=span.ended_ns,
            instrumentation_scope=self._scope,
        )


def _resource(service: str) -> Resource:
    """Describe this process to OTLP receivers. OpenTelemetry's variables take precedence over
    `service`.
    """
    resource = Resource.create({"service.version": VERSION})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": service}))
    return resource


class _OnceInAWhile(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._passed_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s - self._passed_s < _REPORT_EVERY_S:
            return False
        self._passed_s = now_s
        return True
