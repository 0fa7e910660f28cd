"""Spans to an OTLP receiver: in batches, from a thread of its own, bounded, and counted when lost.

OpenTelemetry's exporter encodes, sends and tries again, and honours its own variables
(OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_RESOURCE_ATTRIBUTES and others).
Imported only where traces are exported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from penstock_common.tracing import Span
from penstock_common.version import VERSION

logger = logging.getLogger(__name__)

# A few megabytes; those of a second at some thousand requests a second.
_MAX_WAITING_SPANS = 16_384
_BATCH_SPANS = 256
_BATCH_EVERY_S = 1.0
_REPORT_EVERY_S = 60.0
_LAST_WORDS_S = 2.0
_KINDS = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_FLAGS = TraceFlags(TraceFlags.SAMPLED)


class OtlpSink:
    """Takes spans from an event loop, and sends them from a thread."""

    def __init__(self, url: str, service: str, exporter: SpanExporter | None = None) -> None:
        """`exporter` stands in for OpenTelemetry's in tests."""
        # It tells of each failure: once a minute is often enough, our own count says the rest.
        logging.getLogger(trace_exporter.__name__).addFilter(_OnceInAWhile())
        # For lines of the log: what else a URL has may be a secret.
        parts = urlsplit(url)
        self._where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._exporter = exporter or trace_exporter.OTLPSpanExporter(endpoint=url)
        self._resource = _resource(service)
        self._scope = InstrumentationScope("penstock", VERSION)
        self._waiting: deque[Span] = deque()
        # Spans without room are counted by the event loop, those not taken by the thread.
        self._num_without_room = self._num_failed = self._num_reported = 0
        self._reported_s = float("-inf")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Spans that were not sent and will not be."""
        return self._num_without_room + self._num_failed

    def add(self, spans: Sequence[Span]) -> None:
        """Take spans, or lose them where too many wait; never waits."""
        if len(self._waiting) + len(spans) > _MAX_WAITING_SPANS:
            self._num_without_room += len(spans)
        else:
            self._waiting.extend(spans)

    def close(self) -> None:
        """Send what is left, within a bound."""
        self._closing.set()
        self._thread.join(_LAST_WORDS_S)
        # Ends its waiting for another try.
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closing.wait(_BATCH_EVERY_S):
            self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), _BATCH_SPANS)
            batch = [self._exportable(self._waiting.popleft()) for _ in range(count)]
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                self._num_failed += count
            self._report()
        self._report()

    def _report(self) -> None:
        now_s = time.monotonic()
        num_lost = self.num_lost - self._num_reported
        if num_lost and now_s - self._reported_s >= _REPORT_EVERY_S:
            self._num_reported += num_lost
            self._reported_s = now_s
            logger.warning("%d spans were lost: %s does not take them", num_lost, self._where)

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
    """The resource that OpenTelemetry's variables describe; `service` if they name no service."""
    resource = Resource.create({"service.version": VERSION})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": service}))
    return resource


class _OnceInAWhile(logging.Filter):
    """Lets one record pass, and then none for a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s - self._passed_s < _REPORT_EVERY_S:
            return False
        self._passed_s = now_s
        return True
