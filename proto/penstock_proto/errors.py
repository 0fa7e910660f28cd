"""The codes of a shard's errors on the wire, and everything a penstock client may raise.

PenstockError
├── RequestRefused        the request is at fault; sending it again changes nothing
│   ├── InvalidRequest        a field is out of its bounds
│   ├── NotServed             the shard lacks what the request needs
│   └── PoisonousRequest      engines died of it
├── Overloaded            the shard's queue is full; try later or elsewhere
├── ShardUnavailable      the shard is gone, restarting or draining; retry elsewhere
│   ├── NoShardAvailable      no shard of the fleet can take the request
│   └── IncompatibleShard     the shard speaks another revision of the protocol
├── DeadlineExceeded      the request's own deadline passed
├── Unauthenticated       missing or wrong API key
└── ShardFailed           a defect on the shard's side
"""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Codes of google.rpc, which gRPC's statuses have too. A caller's mistake is never INTERNAL;
    UNAVAILABLE may be retried.
    """

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    INTERNAL = 13
    UNAVAILABLE = 14


class PenstockError(Exception):
    """Base of all errors of this package; its text is one line for a person."""


class RequestRefused(PenstockError):
    """The request is at fault; `field`, `value` and `bound` say how, if they apply."""

    def __init__(self, message: str, *, field: str = "", value: str = "", bound: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.bound = bound


class InvalidRequest(RequestRefused):
    """A field is out of its bounds."""


class NotServed(RequestRefused):
    """The shard lacks what the request needs; `field` names it."""


class PoisonousRequest(RequestRefused):
    """The request made several engines die. The fleet refuses it, and similar requests for
    a while.
    """


class Overloaded(PenstockError):
    """The shard's queue is full; `field` names what the queue is for, if set."""

    field = ""


class ShardUnavailable(PenstockError):
    """The shard is gone, restarting or draining. The only error to retry elsewhere."""

    # True if the engine died or hung while this request ran: the request may be the cause.
    engine_died = False


class NoShardAvailable(ShardUnavailable):
    """No shard of the fleet can take the request."""


class IncompatibleShard(ShardUnavailable):
    """The shard's schema revisions and ours do not overlap."""


class DeadlineExceeded(PenstockError):
    """The request's own deadline passed."""


class Unauthenticated(PenstockError):
    """Missing or wrong API key."""


class ShardFailed(PenstockError):
    """A defect of the shard: not the caller's fault, nor known to be retryable."""


def cause_of(error: PenstockError) -> str:
    """Return the error's name in metrics of failed requests."""
    match error:
        case ShardUnavailable():
            return "engine_died" if error.engine_died else "unavailable"
        case Overloaded():
            return "overloaded"
        case NotServed():
            return "not_served"
        case InvalidRequest():
            return "invalid"
        case Unauthenticated():
            return "unauthenticated"
        case DeadlineExceeded():
            return "deadline"
        case _:
            return "failed"
