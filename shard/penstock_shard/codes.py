"""The codes that a shard's errors have: those of google.rpc, as gRPC's statuses. Knows nothing
else.
"""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """As on the wire. A caller's mistake is never INTERNAL; UNAVAILABLE is worth another try."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    INTERNAL = 13
    UNAVAILABLE = 14
