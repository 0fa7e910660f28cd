"""The codes of a shard's errors: those of google.rpc, as gRPC's statuses are."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """As on the wire. A caller's mistake is never INTERNAL; UNAVAILABLE may be retried."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    INTERNAL = 13
    UNAVAILABLE = 14
