"""Spans on their way to a receiver: bounded, in batches, and sent at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from support.otlp import receiving

from penstock_common.tracing import otlp
from penstock_common.tracing.otlp import OtlpSink
from penstock_common.tracing.spans import Event, Span, SpanContext

CONTEXT = SpanContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)


def span(name: str = "a") -> Span:
    return Span(name=name, context=CONTEXT, started_ns=1, ended_ns=2)


class Exporter(SpanExporter):
    """Takes batches; waits where it is told to."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.go_on.wait(10)
        self.batches.append(len(spans))
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.go_on.set()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_BATCH_EVERY_MS", 10)


def test_all_that_is_to_be_said_of_a_span_arrives() -> None:
    with receiving() as receiver:
        sink = OtlpSink(f"{receiver.endpoint}/v1/traces", "penstock-test")
        sink.add(
            [
                Span(
                    name="whole",
                    kind="server",
                    context=CONTEXT,
                    parent_id="00000000000000ab",
                    started_ns=1_000,
                    ended_ns=2_000,
                    attributes={
                        "text": "é",
                        "number": 3,
                        "share": 0.5,
                        "flag": True,
                        "many": ["a"],
                    },
                    error="UNAVAILABLE",
                    events=[Event("failover", 1_500, {"to": "b"})],
                )
            ]
        )
        sink.close()
    (received,) = receiver.spans
    assert received.service == "penstock-test"
    assert (received.name, received.trace_id, received.span_id, received.parent_id) == (
        *("whole", CONTEXT.trace_id, CONTEXT.span_id, "00000000000000ab"),
    )
    assert (received.span.start_time_unix_nano, received.span.end_time_unix_nano) == (1_000, 2_000)
    assert received.attributes == {
        **{"text": "é", "number": 3, "share": 0.5, "flag": True, "many": ["a"]},
    }
    assert received.events == [("failover", {"to": "b"})]
    assert (received.span.kind, received.span.status.code) == (2, 2)
    assert received.span.status.message == "UNAVAILABLE"


def test_opentelemetrys_own_variables_name_the_service_and_authorize(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=seven")
    with receiving() as receiver:
        sink = OtlpSink(f"{receiver.endpoint}/v1/traces", "penstock-test")
        sink.add([span()])
        sink.close()
    assert [received.service for received in receiver.spans] == ["mine"]
    assert receiver.headers[0]["x-tenant"] == "seven"


def test_spans_go_in_batches_and_the_last_ones_at_the_end() -> None:
    exporter = Exporter()
    sink = OtlpSink("http://a", "test", exporter)
    sink.add([span()] * 600)
    sink.close()
    assert sum(exporter.batches) == 600
    assert max(exporter.batches) <= otlp._BATCH_SPANS


def test_a_receiver_that_takes_nothing_costs_bounded_memory_and_holds_up_nobody() -> None:
    exporter = Exporter()
    exporter.go_on.clear()
    sink = OtlpSink("http://gone", "test", exporter)
    # Whoever waited for it would wait for ever.
    for _ in range(2 * otlp._MAX_WAITING_SPANS // 64):
        sink.add([span()] * 64)
    exporter.go_on.set()
    sink.close()
    assert sum(exporter.batches) <= otlp._MAX_WAITING_SPANS + otlp._BATCH_SPANS


def test_what_the_exporter_says_of_failures_is_one_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Nothing listens there.
    sink = OtlpSink("http://127.0.0.1:9/v1/traces", "test")
    exporters = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    for _ in range(5):
        exporters.warning("again")
    sink.close()
    assert [record.message for record in caplog.records] == ["again"]
    for each in list(exporters.filters):
        exporters.removeFilter(each)


def test_the_end_waits_no_longer_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_LAST_WORDS_S", 0.05)
    exporter = Exporter()
    exporter.go_on.clear()
    sink = OtlpSink("http://a", "test", exporter)
    sink.add([span()])
    began_s = time.monotonic()
    sink.close()
    assert time.monotonic() - began_s < 5
