"""Traces: W3C trace context, spans, and sampling.

A span is made at its end, from times noted before, so tracing costs nothing during generation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# Later versions of the format may append to the header.
_MAX_TRACEPARENT_CHARACTERS = 512
_SAMPLED = 0x01
# The random half of a trace's id is below this number. It decides whether the trace is sampled.
_ID_LIMIT = 2**64
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A span's ids, in lower-case hex, as on the wire."""

    trace_id: str
    span_id: str
    sampled: bool

    @classmethod
    def parse(cls, traceparent: str) -> SpanContext | None:
        """Return None if W3C's specification says to ignore the header."""
        if len(traceparent) > _MAX_TRACEPARENT_CHARACTERS:
            return None
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        # Later versions may have more fields; the first four stay the same.
        if version == "ff" or (version == "00" and more is not None):
            return None
        if not trace_id.strip("0") or not span_id.strip("0"):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    @property
    def traceparent(self) -> str:
        """The header that makes other processes' spans children of this one."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"

    def child(self) -> SpanContext:
        return SpanContext(self.trace_id, _random_id(64), self.sampled)


def _random_id(bits: int) -> str:
    # Zero is not an id.
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"


def begin(traceparent: str, share: float) -> tuple[SpanContext, str]:
    """Return the context of a new span, and its parent's id; "" for a trace's first span.

    `share` of the traces that begin here are sampled.
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
    """An event within a span; Unix time in ns."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A finished span; times are Unix times in ns."""

    name: str
    kind: Literal["server", "client", "internal"] = "internal"
    context: SpanContext
    # "" for a trace's first span.
    parent_id: str = ""
    started_ns: int
    ended_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    # A word for the error, or "".
    error: str = ""
    events: Sequence[Event] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """A request's times, which are of a monotonic clock, as Unix time. `arrived_s` on that clock is
    `arrived_ns` in Unix time.
    """

    context: SpanContext
    arrived_s: float
    arrived_ns: int

    def unix_ns(self, at_s: float) -> int:
        return self.arrived_ns + round((at_s - self.arrived_s) * _NS)

    def phase(self, name: str, begin_s: float, end_s: float) -> Span:
        """Make the span of one of the request's phases."""
        return Span(
            name=name,
            context=self.context.child(),
            parent_id=self.context.span_id,
            started_ns=self.unix_ns(begin_s),
            ended_ns=self.unix_ns(end_s),
        )


def known(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    """Leave out the attributes that are None."""
    return {name: value for name, value in attributes.items() if value is not None}


class SpanSink(Protocol):
    """The destination of spans."""

    def add(self, spans: Sequence[Span]) -> None:
        """Take spans, or lose them, without waiting."""

    def close(self) -> None:
        """Send the remaining spans, within a bounded time."""
