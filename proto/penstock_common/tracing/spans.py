"""Traces: W3C trace context, spans, and who is traced.

A span is made when what it tells of is over, from times that were noted on the way, so tracing
costs nothing while tokens flow.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# The longest accepted header: later versions of the format may append to it.
_MAX_TRACEPARENT_CHARACTERS = 512
_SAMPLED = 0x01
# One more than the largest value of a trace id's random half, of which sampling takes a share.
_ID_LIMIT = 2**64


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
    # A word for what went wrong; "" if nothing did.
    error: str = ""
    events: Sequence[Event] = ()


class SpanSink(Protocol):
    """Where spans go."""

    def add(self, spans: Sequence[Span]) -> None:
        """Take spans, or lose them; never waits."""

    def close(self) -> None:
        """Send what is left, within a bound."""
