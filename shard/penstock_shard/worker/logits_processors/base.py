"""What a logits processor is: one way to change logits before a token is drawn.

A processor says which requests want it, keeps what it knows of each sequence, and changes the
logits of all rows that want it in one pass. An element is computed from its own row alone, with
operations that round the same way everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.device.async_copy import to_device
from penstock_shard.ipc.request import Request
from penstock_shard.worker.base import Admission


class LogitsState:
    """What a processor keeps of one sequence, at one position of its output, beginning with the one
    that follows the tokens of its admission. Here: of a change that is the same at each.
    """

    @property
    def problem(self) -> str:
        """Why it leaves no token to draw, if it knows."""
        return ""

    def choose(self) -> bool:
        """Work out what changes at this position; whether anything does."""
        return True

    def append(self, token_id: int) -> None:
        """Advance by the token that was drawn at this position."""

    def skip(self) -> None:
        """Advance without a token: none could be drawn. A step launched ahead may still ask for the
        next position; its result is thrown away.
        """

    def repeat(self) -> None:
        """Take a `skip` back."""


State = TypeVar("State", bound=LogitsState)


class LogitsProcessor(ABC, Generic[State]):
    """One of the changes that `order` lists."""

    @abstractmethod
    def wants(self, request: Request) -> bool:
        """Whether the request asks for this change."""

    @abstractmethod
    def begin(self, admission: Admission) -> State:
        """What is kept of a sequence whose request wants this."""

    def prepare(self, states: abc.Sequence[State]) -> None:
        """Begin what needs no logits for these, which `apply` gets next."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: abc.Sequence[tuple[int, State]]) -> None:
        """Change logits float32 [n, V], contiguous, in place: of these rows by these states."""

    def abandon(self) -> None:
        """What was prepared is not applied."""


def elements(logits: Tensor, rows: abc.Sequence[tuple[int, NDArray[np.int64]]]) -> Tensor:
    """Indices in the flat logits of each row's ids, row after row."""
    vocabulary = logits.shape[1]
    places = np.concatenate([i * vocabulary + ids for i, ids in rows])
    return to_device(places, logits.device)


def index(rows: abc.Sequence[int], logits: Tensor) -> Tensor:
    """Row numbers on the device of the logits."""
    return to_device(np.array(rows, dtype=np.int64), logits.device)


def ban(logits: Tensor, rows: abc.Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    """Set the logits of each row's ids to -inf."""
    logits.view(-1).index_fill_(0, elements(logits, rows), float("-inf"))
