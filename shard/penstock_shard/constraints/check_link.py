"""What the server and its check process say to each other, and how it is framed.

A length, then msgpack of one of the types below. The server speaks first; to each constraint there
is one verdict. Knows neither of the two processes.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from penstock_shard.request import ConstraintLimits

LENGTH = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()


class Start(msgspec.Struct, array_like=True, frozen=True):
    """The first message: for which tokens constraints are, and what one of them may take."""

    tokenizer_json: bytes
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limits: ConstraintLimits


class Started(msgspec.Struct, array_like=True, frozen=True):
    """Constraints are taken, or there is a `problem`."""

    problem: str


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """Why a constraint is refused, "" where it is not."""

    reason: str
    # The same constraint gets the same verdict at any other time.
    is_lasting: bool = True
    # For the log: how the process ended that compiled it, where that was not as it should.
    ending: str = ""


def patience_s(timeout_s: float) -> float:
    """How long a check may take by the clock, of one that may take so long of the processor."""
    return 1.0 + 3.0 * timeout_s


def encode_frame(message: Any) -> bytes:
    """A message with its length before it."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
