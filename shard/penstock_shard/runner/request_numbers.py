"""A small number for each live sequence, so that state of sequences can be kept in arrays.

Knows which sequence has which number. Knows nothing of the state kept by number.
"""

from __future__ import annotations

from collections import abc
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock_shard.sequence import Sequence

Integers = NDArray[np.int64]
Item = TypeVar("Item", bound=np.generic)

_FIRST_CAPACITY = 64


class RequestNumbers:
    """Assigns numbers, low ones first. Code that keeps state by number compares `serials` to see
    whether it is still the same sequence's: a number assigned again has another serial, never 0.
    """

    def __init__(self) -> None:
        self.serials: Integers = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._numbers: dict[Sequence, int] = {}
        self._free = list(range(_FIRST_CAPACITY - 1, -1, -1))
        self._given = 0

    @property
    def capacity(self) -> int:
        """All numbers are below this."""
        return len(self.serials)

    def of(self, sequences: abc.Sequence[Sequence]) -> Integers:
        """The number of each; those that are new get one."""
        numbers = map(self._numbers.__getitem__, sequences)
        try:
            return np.fromiter(numbers, dtype=np.int64, count=len(sequences))
        except KeyError:
            return np.array([self._number(sequence) for sequence in sequences], dtype=np.int64)

    def forget(self, sequence: Sequence) -> int | None:
        """Free the number of a sequence that ended, and return it."""
        number = self._numbers.pop(sequence, None)
        if number is not None:
            self._free.append(number)
        return number

    def _number(self, sequence: Sequence) -> int:
        number = self._numbers.get(sequence)
        if number is None:
            if not self._free:
                self._grow()
            number = self._numbers[sequence] = self._free.pop()
            self._given += 1
            self.serials[number] = self._given
        return number

    def _grow(self) -> None:
        before = self.capacity
        self.serials = grown(self.serials, 2 * before)
        self._free = list(range(2 * before - 1, before - 1, -1))


def grown(array: NDArray[Item], capacity: int) -> NDArray[Item]:
    """The array, padded with zeros to the length `capacity`."""
    if len(array) >= capacity:
        return array
    larger = np.zeros((capacity, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger
