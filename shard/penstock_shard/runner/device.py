"""Between a runner's host and its device: copies that nobody waits for.

On cpu there is nothing to copy, and all is over when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def is_host(tensor: Tensor) -> bool:
    """Whether what is computed there can be looked at for nothing."""
    return tensor.device.type == "cpu"


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Memory of the host, uint8, from which the device copies without anybody waiting. torch keeps
    it from being used again until such copies are over.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array there; on cpu the same memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete once the device has come to a `mark` set after this; on cpu the
    same memory.
    """
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def mark(device: torch.device) -> Callable[[], None]:
    """A place behind all that the device was given so far; to call it is to wait until the device
    has come there.
    """
    if device.type == "cpu":
        return _come_already
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def _come_already() -> None:
    return None
