"""Recorded calls of the CPU kernels, which one C call repeats.

A step of few tokens has about 100 calls, each of which takes microseconds in Python. As long as the
tensors keep their addresses, the arguments of the calls stay the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from penstock_shard.kernels.c_calls import check

# Recordable functions in the order of recorded.h, with their arguments as in `declare`.
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
    def __init__(self, call_again: Callable[[Any, int], int]) -> None:
        self._call_again = call_again
        self._calls: list[_Call] = []
        # Keeps tensors at their addresses.
        self._held: list[object] = []
        self._array: ctypes.Array[_Call] | None = None

    def holding(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that takes tensors, to keep its arguments alive."""

        def hold(*arguments: object, **named: object) -> Any:
            self._held.append((arguments, named))
            return method(*arguments, **named)

        return hold

    def noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function `name`, to record its calls."""

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
        """Repeat all calls in order. Raises their errors."""
        if self._array is None:
            self._array = (_Call * len(self._calls))(*self._calls)
        check(self._call_again(self._array, len(self._array)))
