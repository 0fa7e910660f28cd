"""A request's record as the spans of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.router_doubles import FakeFleet, memory_router
from unit.router.test_request_log import failed_over, record_of

from penstock_common.tracing.spans import Span, SpanContext
from penstock_router.observe.request_record import RequestRecord
from penstock_router.observe.tracing import METHOD, RequestTraces
from penstock_shard.server.observe import tracing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
# Of the records' arrival.
ARRIVED_NS = 1_800_000_000_000_000_000


class Sink:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, spans: Sequence[Span]) -> None:
        self.spans += spans

    def close(self) -> None:
        pass


def spans_of(record: RequestRecord) -> list[Span]:
    sink = Sink()
    RequestTraces(sink).on_request_end(record)
    return sink.spans


def ms(span: Span) -> tuple[float, float]:
    return tuple(round((at - ARRIVED_NS) / 1e6, 1) for at in (span.started_ns, span.ended_ns))  # type: ignore[return-value]


def test_a_request_that_changed_shards_is_one_trace() -> None:
    record = failed_over()
    record.parent_span_id = "0" * 15 + "9"
    whole, prepare, queue, first, second = spans_of(record)
    assert {span.context.trace_id for span in (whole, prepare, queue, first, second)} == {TRACE}
    assert (whole.name, whole.kind, whole.context.span_id, whole.parent_id) == (
        *("POST /v1/chat/completions", "server", SPAN, "0" * 15 + "9"),
    )
    assert [span.parent_id for span in (prepare, queue, first, second)] == [SPAN] * 4
    assert [(span.name, ms(span)) for span in (whole, prepare, queue, first, second)] == [
        ("POST /v1/chat/completions", (0.0, 1112.0)),
        ("prepare", (0.0, 2.0)),
        ("queue", (2.0, 12.0)),
        (METHOD, (12.0, 500.0)),
        (METHOD, (550.0, 1100.0)),
    ]
    # Of which the shards' own spans are children.
    assert [first.context.span_id, second.context.span_id] == ["0" * 15 + "1", "0" * 15 + "2"]
    assert [(span.kind, span.error) for span in (first, second)] == [
        *(("client", "unavailable"), ("client", "")),
    ]
    assert (first.attributes["server.address"], first.attributes["server.port"]) == ("a", 1)
    (failover,) = whole.events
    assert (failover.name, failover.attributes) == (
        "failover",
        {
            "penstock.shard.from": "a:1",
            "penstock.shard.to": "b:2",
            "penstock.failover.reason": "unavailable",
        },
    )


def test_the_first_span_says_what_came_and_what_was_answered() -> None:
    (whole, *_) = spans_of(record_of())
    assert whole.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "toy",
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.112,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 34,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "penstock.request.id": "mine",
        "penstock.request.outcome": "stop",
        "penstock.key.name": "ann",
    }


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"status": 400, "outcome": "refused", "error": "BadRequestError: n"}, ""),
        ({"status": 499, "outcome": "disconnect"}, ""),
        ({"status": 503, "outcome": "error", "error": "ServiceUnavailable"}, "ServiceUnavailable"),
        ({"status": 504, "outcome": "timeout"}, "timeout"),
        ({"status": 200, "outcome": "error", "error": "ShardFailed"}, "ShardFailed"),
    ],
)
def test_only_what_the_server_failed_is_an_error(values: dict[str, Any], error: str) -> None:
    (whole, *_) = spans_of(record_of(**values))
    assert (whole.error, whole.attributes.get("error.type", "")) == (error, error)


def test_a_method_that_a_client_made_up_names_no_span() -> None:
    (whole, *_) = spans_of(record_of(method="MADE-UP", route="unknown"))
    assert (whole.name, whole.attributes["http.request.method"]) == ("HTTP unknown", "_OTHER")


def test_what_it_never_came_to_has_no_span() -> None:
    record = record_of(prepared_s=None, placed_s=None, usage=None, first_token_s=None)
    assert [span.name for span in spans_of(record)] == ["POST /v1/chat/completions"]


def test_a_request_that_is_not_sampled_has_no_spans() -> None:
    assert spans_of(record_of(traceparent=f"00-{TRACE}-{SPAN}-00")) == []
    assert spans_of(record_of(traceparent="")) == []


def test_without_a_sink_a_context_goes_through_as_it_came() -> None:
    traces = RequestTraces(None)
    assert traces.begin([PARENT]) == (PARENT, "")
    assert (
        traces.begin([]) == traces.begin(["nonsense"]) == traces.begin([PARENT, PARENT]) == ("", "")
    )


def test_with_a_sink_a_request_is_a_span_below_its_callers() -> None:
    traces = RequestTraces(Sink(), share=0.0)
    traceparent, parent_span_id = traces.begin([PARENT])
    context = SpanContext.parse(traceparent)
    assert context is not None
    assert (context.trace_id, context.sampled, parent_span_id) == (TRACE, True, SPAN)
    alone = SpanContext.parse(traces.begin([])[0])
    assert alone is not None
    assert not alone.sampled


def test_both_ends_call_the_method_the_same() -> None:
    assert tracing.METHOD == METHOD


async def test_shards_are_given_the_requests_context(fleet: FakeFleet) -> None:
    async with memory_router(fleet) as router:
        await router.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, traceparent=PARENT)
        await router.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, traceparent="x")
    assert [request.traceparent for request in fleet.requests] == [PARENT, ""]
