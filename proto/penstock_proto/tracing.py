"""Traces: W3C trace context, spans, and who is traced.

A span is made when what it tells of is over, from times that were noted on the way, so tracing
costs nothing while tokens flow. `otlp.py`, which alone imports OpenTelemetry, sends spans off and
is loaded only where an endpoint is given. Knows neither HTTP nor gRPC nor what spans tell of.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# Of a header that a later version may have made longer.
_MAX_TRACEPARENT_CHARACTERS = 512
_SAMPLED = 0x01
# What shares of traces are compared with: the random half of a trace id.
_ID_LIMIT = 2**64

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SHARE_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Which span of which trace; ids in lower-case hex, as on the wire."""

    trace_id: str
    span_id: str
    sampled: bool

    @classmethod
    def parse(cls, traceparent: str) -> SpanContext | None:
        """A traceparent header's; None for one that W3C's specification has ignored."""
        if len(traceparent) > _MAX_TRACEPARENT_CHARACTERS:
            return None
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        # Later versions may have more fields; what is known of the first four stays.
        if version == "ff" or (version == "00" and more is not None):
            return None
        if not trace_id.strip("0") or not span_id.strip("0"):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    @property
    def traceparent(self) -> str:
        """The header by which others make their spans children of this one."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"

    def child(self) -> SpanContext:
        """Another span of the trace."""
        return SpanContext(self.trace_id, _random_id(64), self.sampled)


def _random_id(bits: int) -> str:
    # Zero is no id.
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"


def begin(traceparent: str, share: float) -> tuple[SpanContext, str]:
    """The context of a span that is about to begin, and its parent's id; "" for a trace's first.

    Whoever began the trace has decided whether it is sampled; of those begun here a `share` is.
    """
    parent = SpanContext.parse(traceparent)
    if parent is not None:
        return parent.child(), parent.span_id
    trace_id = _random_id(128)
    sampled = int(trace_id[16:], 16) < share * _ID_LIMIT
    return SpanContext(trace_id, _random_id(64), sampled), ""


Value = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened within a span; Unix time in ns."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that is over: from when to when (Unix time in ns), and what is to be said of it."""

    name: str
    kind: Literal["server", "client", "internal"] = "internal"
    context: SpanContext
    # "" for a trace's first.
    parent_id: str = ""
    started_ns: int
    ended_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    # What went wrong, in a word; "" where nothing did.
    error: str = ""
    events: Sequence[Event] = ()


class SpanSink(Protocol):
    """Where spans go."""

    def add(self, spans: Sequence[Span]) -> None:
        """Take spans, or lose them; never waits."""

    def close(self) -> None:
        """Send what is left, within a bound."""


# ---- what the command line and the environment say ---------------------------------------------


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Where spans go, and the share of traces begun here that is sampled."""

    url: str
    share: float = 1.0


def read_tracing(endpoint: str | None, environment: Mapping[str, str]) -> TracingConfig | None:
    """From --otlp-endpoint and OpenTelemetry's own variables; None where there is no endpoint.

    Raises:
        ValueError: one line that names the flag or the variable.
    """
    source, url = "--otlp-endpoint", endpoint
    if url is None:
        source = _TRACES_ENDPOINT_VARIABLE
        url = environment.get(source, "")
        if not url:
            source, url = ENDPOINT_VARIABLE, environment.get(ENDPOINT_VARIABLE, "")
            if not url:
                return None
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise ValueError(f"{source}: {url[:100]!r} is not http://HOST:PORT or https://HOST:PORT")
    if source != _TRACES_ENDPOINT_VARIABLE:
        url = url.rstrip("/") + "/v1/traces"
    for variable in _PROTOCOL_VARIABLES:
        if environment.get(variable, "http/protobuf") not in ("", "http/protobuf"):
            value = environment[variable][:100]
            raise ValueError(f"{variable}: {value!r} is not spoken; http/protobuf is (port 4318)")
    if not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        raise ValueError(f"{source}: needs the extra otlp: pip install 'penstock[otlp]'")
    return TracingConfig(url, _share(environment.get(_SHARE_VARIABLE, "")))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # Nor is what it lies in.
        return False


def _share(text: str) -> float:
    try:
        share = float(text or "1")
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{_SHARE_VARIABLE}: {text[:100]!r} is not between 0 and 1")
    return share


def open_sink(config: TracingConfig, service: str) -> SpanSink:
    """A sink of spans of this service, which OTEL_SERVICE_NAME may call otherwise."""
    from penstock_proto.otlp import OtlpSink

    return OtlpSink(config.url, service)
