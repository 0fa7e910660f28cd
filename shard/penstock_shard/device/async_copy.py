"""Asynchronous copies between host and device.

On cpu nothing is copied, and all work is done when its call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def is_host(tensor: Tensor) -> bool:
    """Whether the tensor is on the host, so that reading it does not wait for a device."""
    return tensor.device.type == "cpu"


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Host memory, uint8, that can be copied to the device asynchronously. torch does not reuse it
    before such copies are done.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device; on cpu the same memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete once a `mark` set after this call is reached; on cpu the same
    memory.
    """
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def mark(device: torch.device) -> Callable[[], None]:
    """Mark the end of all work given to the device so far. Calling the result waits until that work
    is done.
    """
    if device.type == "cpu":
        return _come_already
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def _come_already() -> None:
    return None
