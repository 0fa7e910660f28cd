"""Calls of the CPU kernels that are recorded, and then made again by one call of C.

A step of few tokens is a hundred calls, of some microseconds of Python each, whose arguments are
the same each time if what they read and write lies where it did.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from penstock_shard.kernels.c_calls import check

# The functions that can be recorded, in the order of recorded.h, and their arguments as `declare`
# has them.
RECORDABLE = {
    "linear": "pipppi",
    "rows": "ppip",
    "look_up": "piiipip",
    "add_rms_norm": "pppiiffp",
    "gated_activation": "piiip",
    "rope_and_cache": "piipppppiippffp",
    "write_cache": "ppppi",
    "attention": "piippppiififppp",
}
_NUMBERS = {name: number for number, name in enumerate(RECORDABLE)}


class _Call(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_int64),
        ("numbers", ctypes.c_int64 * 13),
        ("floats", ctypes.c_float * 2),
    )


class RecordedCalls:
    """Calls, and the tensors that they are of."""

    def __init__(self, call_again: Callable[[Any, int], int]) -> None:
        self._call_again = call_again
        self._calls: list[_Call] = []
        # Tensors stay where they are as long as these are here.
        self._held: list[object] = []
        self._array: ctypes.Array[_Call] | None = None

    def holding(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method of tensors; what it is called with is held."""

        def hold(*arguments: object, **named: object) -> Any:
            self._held.append((arguments, named))
            return method(*arguments, **named)

        return hold

    def noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of this name; its calls are recorded."""

        def note(*arguments: float | None) -> Any:
            letters = RECORDABLE[name]
            numbers = [
                int(each or 0)
                for each, letter in zip(arguments, letters, strict=True)
                if letter != "f"
            ]
            floats = [
                float(each or 0)
                for each, letter in zip(arguments, letters, strict=True)
                if letter == "f"
            ]
            call = _Call(_NUMBERS[name])
            call.numbers[: len(numbers)] = numbers
            call.floats[: len(floats)] = floats
            self._calls.append(call)
            return function(*arguments)

        return note

    def make_again(self) -> None:
        """Make all calls, in order. Raises what they raise."""
        if self._array is None:
            self._array = (_Call * len(self._calls))(*self._calls)
        check(self._call_again(self._array, len(self._array)))
