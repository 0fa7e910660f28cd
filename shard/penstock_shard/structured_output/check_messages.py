"""Messages between the server and its check process; each message gets one answer.

The first message is `Start`, on the first lane, followed by the tokenizer's JSON; all later ones
are `Check`.
"""

from __future__ import annotations

import msgspec

from penstock_proto.types import Constraint
from penstock_shard.config import ConstraintLimits


class Start(msgspec.Struct, array_like=True, frozen=True):
    """The vocabulary and the limits for all later checks."""

    tokenizer_bytes: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limits: ConstraintLimits


class Check(msgspec.Struct, array_like=True, frozen=True):
    """A constraint to check within `timeout_s` of processor time."""

    constraint: Constraint
    timeout_s: float


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The reason of a refusal; "" if there is none."""

    reason: str = ""
    # Exit code of the fork, if it died: negative for a signal.
    exit_code: int = 0


def patience_s(timeout_s: float) -> float:
    """The wall-clock limit of a check with `timeout_s` of processor time."""
    return 1.0 + 3.0 * timeout_s
