"""The interface of a logits processor, which changes logits before a token is drawn.

A processor says which requests want it, keeps its state of each sequence, and changes the logits of
all rows that want it in one pass. It computes an element from the element's own row alone, with
operations that round the same way everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_shard.device.async_copy import to_device
from penstock_shard.sequence import Sequence


class LogitsState:
    """A processor's state of one sequence, at one position of its output. The first position is
    that after the tokens at admission. This base class is for a change that is the same at all
    positions.
    """

    @property
    def problem(self) -> str:
        """The reason why the processor leaves no token to draw, if it knows one."""
        return ""

    def choose(self) -> bool:
        """Compute the change at this position. True if there is one."""
        return True

    def append(self, token_id: int) -> None:
        """Advance by the token that was drawn at this position."""

    def skip(self) -> None:
        """Advance without a token, because none could be drawn. A step that is already launched may
        still ask for the next position; its result is dropped.
        """

    def repeat(self) -> None:
        """Undo a `skip`."""


State = TypeVar("State", bound=LogitsState)


class LogitsProcessor(ABC, Generic[State]):
    @abstractmethod
    def wants(self, request: EngineRequest) -> bool:
        """Tell whether the request asks for this change."""

    @abstractmethod
    def begin(self, sequence: Sequence) -> State:
        """Return the state for a sequence."""

    def prepare(self, states: abc.Sequence[State]) -> None:
        """Begin the work that needs no logits. `apply` gets these states next."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: abc.Sequence[tuple[int, State]]) -> None:
        """Change logits float32 [n, V], contiguous, in place, in the given rows."""

    def abandon(self) -> None:
        """Drop what was prepared; it will not be applied."""


def elements(logits: Tensor, rows: abc.Sequence[tuple[int, NDArray[np.int64]]]) -> Tensor:
    """Return the indices of each row's ids in the flat logits."""
    vocabulary = logits.shape[1]
    places = np.concatenate([i * vocabulary + ids for i, ids in rows])
    return to_device(places, logits.device)


def index(rows: abc.Sequence[int], logits: Tensor) -> Tensor:
    """Copy row numbers to the device of the logits."""
    return to_device(np.array(rows, dtype=np.int64), logits.device)


def ban(logits: Tensor, rows: abc.Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    logits.view(-1).index_fill_(0, elements(logits, rows), float("-inf"))
