"""A small number for each request that is live, so that what is kept of requests lies in arrays.

Knows who has which number. Knows nothing of what is kept under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock_shard.request import Request

Integers = NDArray[np.int64]
Item = TypeVar("Item", bound=np.generic)

_FIRST_CAPACITY = 64


class RequestSlots:
    """Gives out numbers, low ones first. Whoever keeps something under numbers looks at `serials`
    to see whose it is: a number that was given out anew has another serial, never 0.
    """

    def __init__(self) -> None:
        self.serials: Integers = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._slots: dict[Request, int] = {}
        self._free = list(range(_FIRST_CAPACITY - 1, -1, -1))
        self._given = 0

    @property
    def capacity(self) -> int:
        """All numbers are below this."""
        return len(self.serials)

    def of(self, requests: Sequence[Request]) -> Integers:
        """The number of each; those that are new get one."""
        numbers = map(self._slots.__getitem__, requests)
        try:
            return np.fromiter(numbers, dtype=np.int64, count=len(requests))
        except KeyError:
            return np.array([self._slot(request) for request in requests], dtype=np.int64)

    def forget(self, request: Request) -> int | None:
        """The request is over; the number it had."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)
        return slot

    def _slot(self, request: Request) -> int:
        slot = self._slots.get(request)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slots[request] = self._free.pop()
            self._given += 1
            self.serials[slot] = self._given
        return slot

    def _grow(self) -> None:
        before = self.capacity
        self.serials = grown(self.serials, 2 * before)
        self._free = list(range(2 * before - 1, before - 1, -1))


def grown(array: NDArray[Item], capacity: int) -> NDArray[Item]:
    """The array with zeros behind what it has, `capacity` long."""
    if len(array) >= capacity:
        return array
    larger = np.zeros((capacity, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger
