"""Asynchronous copies between host and device. On cpu nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def is_host(tensor: Tensor) -> bool:
    """Tell whether a tensor is in host memory, so that reading it waits for no device."""
    return tensor.device.type == "cpu"


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Make a uint8 buffer for asynchronous copies to the device. torch does not reuse its memory
    before these copies are done.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to the device; on cpu it is the same memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host; on cpu it is the same memory. The copy is complete once a `mark`
    that was made after this call is reached.
    """
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def mark(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for all work that the device has now."""
    if device.type == "cpu":
        return _come_already
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def _come_already() -> None:
    return None
