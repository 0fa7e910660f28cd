"""Calls of C functions on tensors: types, statuses, and checks of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_OUT_OF_BOUNDS = {
    1: "a slot is outside the cache",
    2: "a position is outside the rotation tables",
    3: "a block table names a block outside the cache or is too short",
    5: "a row is outside the weight",
}
_NO_MEMORY = 4
_ARGUMENT_TYPES: dict[str, type[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float]] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
}


def declare(
    library: ctypes.CDLL, name: str, arguments: str, result: type[ctypes.c_int64] | None
) -> Callable[..., Any]:
    """Return a function of the library. `arguments` has a letter for each argument: p(ointer),
    i(nteger) or f(loat).
    """
    function = library[f"penstock_{name}"]
    function.argtypes = [_ARGUMENT_TYPES[letter] for letter in arguments]
    function.restype = result
    return function


def check(status: int) -> None:
    """Raise the error for a C function's status."""
    if status == _NO_MEMORY:
        raise MemoryError("no scratch memory for the cpu kernels")
    if status:
        raise IndexError(_OUT_OF_BOUNDS[status])


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous()


def say(tensor: Tensor) -> str:
    strided = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}{strided}"
