"""What the server and its check process say to each other: each message gets one answer.

The first message, on the first lane, is the `Start` with the tokenizer's JSON after it; all others
are a `Check`.
"""

from __future__ import annotations

import msgspec

from penstock_shard.config import ConstraintLimits
from penstock_shard.ipc.request import Constraint


class Start(msgspec.Struct, array_like=True, frozen=True):
    """The vocabulary that constraints are for, and the limits of one."""

    tokenizer_bytes: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limits: ConstraintLimits


class Check(msgspec.Struct, array_like=True, frozen=True):
    """A constraint to be tried out, for so much processor time."""

    constraint: Constraint
    timeout_s: float


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """Why the constraint, or the tokenizer, is refused; "" if it is not."""

    reason: str = ""
    # Exit code of the process that tried it out, if that died: negative for a signal.
    exit_code: int = 0


def patience_s(timeout_s: float) -> float:
    """How long a check may take by the clock that may take `timeout_s` of processor time."""
    return 1.0 + 3.0 * timeout_s
