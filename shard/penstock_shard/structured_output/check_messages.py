"""Messages between the server and its check process.

The server sends first; each check gets one verdict, in any order.
"""

from __future__ import annotations

import msgspec

from penstock_shard.config import ConstraintLimits
from penstock_shard.ipc.request import Constraint


class Start(msgspec.Struct, array_like=True, frozen=True):
    """The first message: the vocabulary that constraints are for, and the limits of one."""

    tokenizer_json: bytes
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limits: ConstraintLimits


class Started(msgspec.Struct, array_like=True, frozen=True):
    """The process is ready for constraints, or `problem` says why not."""

    problem: str


class Check(msgspec.Struct, array_like=True, frozen=True):
    """A constraint to be tried out, for so much processor time; the verdict has the same number."""

    number: int
    constraint: Constraint
    timeout_s: float


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """Why a constraint is refused; "" if it is not."""

    reason: str
    number: int = 0
    # Whether the same constraint would get the same verdict at any other time.
    is_lasting: bool = True
    # For the log: how the process that compiled it ended, if not as it should.
    ending: str = ""
    # Whether it took all of its time.
    is_overdue: bool = False


def patience_s(timeout_s: float) -> float:
    """How long a check may take by the clock that may take `timeout_s` of processor time."""
    return 1.0 + 3.0 * timeout_s
