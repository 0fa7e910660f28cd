"""W3C trace context: what is read, what is ignored, and who is traced."""

from __future__ import annotations

import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_common.tracing.spans import SpanContext, begin
from penstock_common.tracing.trace_export import TracingConfig, read_tracing

# How long examples take says more of the machine than of the code.
ANY_PACE = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"

ids = st.integers(1, 2**64 - 1)
contexts = st.builds(
    lambda high, low, span, sampled: SpanContext(f"{high:016x}{low:016x}", f"{span:016x}", sampled),
    *(ids, ids, ids, st.booleans()),
)


def test_the_specifications_own_example_is_read() -> None:
    assert SpanContext.parse(PARENT) == SpanContext(TRACE, SPAN, sampled=True)
    assert SpanContext.parse(f"00-{TRACE}-{SPAN}-00") == SpanContext(TRACE, SPAN, sampled=False)


@ANY_PACE
@given(contexts)
def test_what_is_written_is_read_again(context: SpanContext) -> None:
    assert SpanContext.parse(context.traceparent) == context


@ANY_PACE
@given(st.text(max_size=80))
def test_no_text_breaks_the_reader(text: str) -> None:
    context = SpanContext.parse(text)
    assert context is None or context.trace_id in text


@ANY_PACE
@given(st.text("0123456789abcdefABCDEF-gG\n ", min_size=50, max_size=60))
def test_whatever_is_read_is_a_context_that_others_read(text: str) -> None:
    context = SpanContext.parse(text)
    assert context is None or SpanContext.parse(context.traceparent) == context


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-more",
        f"01-{TRACE}-{SPAN}-01more",
        f"{PARENT}\n",
        f" {PARENT}",
        f"01-{TRACE}-{SPAN}-01-{'x' * 512}",
    ],
)
def test_what_the_specification_has_ignored_is_ignored(traceparent: str) -> None:
    assert SpanContext.parse(traceparent) is None


def test_of_a_later_version_the_known_fields_are_read() -> None:
    later = SpanContext.parse(f"01-{TRACE}-{SPAN}-03-more")
    assert later == SpanContext(TRACE, SPAN, sampled=True)


def test_a_span_goes_on_with_its_callers_trace_and_decision() -> None:
    for sampled in (True, False):
        parent = SpanContext(TRACE, SPAN, sampled)
        context, parent_id = begin(parent.traceparent, share=0.0 if sampled else 1.0)
        assert (context.trace_id, context.sampled, parent_id) == (TRACE, sampled, SPAN)
        assert context.span_id != SPAN


def test_without_a_usable_context_a_trace_begins() -> None:
    contexts = [begin("00-nonsense", share=1.0) for _ in range(100)]
    assert {parent_id for _, parent_id in contexts} == {""}
    assert len({context.trace_id for context, _ in contexts}) == 100
    assert all(SpanContext.parse(context.traceparent) == context for context, _ in contexts)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_that_share_of_new_traces_is_sampled(share: float) -> None:
    sampled = sum(begin("", share)[0].sampled for _ in range(2000))
    # Five standard deviations.
    assert abs(sampled / 2000 - share) <= 5 * (share * (1 - share) / 2000) ** 0.5


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert read_tracing(None, {}) is None
    assert read_tracing(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None


@pytest.mark.parametrize(
    ("flag", "environment", "url"),
    [
        ("http://a:4318", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b"}, "http://a:4318/v1/traces"),
        ("http://a:4318/", {}, "http://a:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://b/x"}, "https://b/x/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/as/is"}, "http://c/as/is"),
    ],
)
def test_the_flag_goes_before_the_variables(
    flag: str | None, environment: dict[str, str], url: str
) -> None:
    assert read_tracing(flag, environment) == TracingConfig(url, 1.0)


@pytest.mark.parametrize(
    ("flag", "environment", "reason"),
    [
        ("localhost:4318", {}, "--otlp-endpoint: 'localhost:4318' is not http://HOST:PORT"),
        ("", {}, "--otlp-endpoint: '' is not"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "grpc://a"}, "OTEL_EXPORTER_OTLP_ENDPOINT: 'grpc:"),
        ("http://a", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "PROTOCOL: 'grpc' is not spoken"),
        ("http://a", {"OTEL_TRACES_SAMPLER_ARG": "half"}, "ARG: 'half' is not between 0 and 1"),
        ("http://a", {"OTEL_TRACES_SAMPLER_ARG": "nan"}, "ARG: 'nan' is not between 0 and 1"),
        ("http://a", {"OTEL_TRACES_SAMPLER_ARG": "1.5"}, "ARG: '1.5' is not between 0 and 1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(
    flag: str | None, environment: dict[str, str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        read_tracing(flag, environment)


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(
        ValueError, match=r"--otlp-endpoint: install penstock with the extra otlp: pip install"
    ):
        read_tracing("http://a:4318", {})
