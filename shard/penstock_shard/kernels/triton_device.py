"""A device's shared memory."""

from __future__ import annotations

import functools

import torch
import triton

# Size in Triton's interpreter: that of an H100 or H200, for which tiles are sized.
_INTERPRETED_BYTES = 227 << 10


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use: 99 to 227 kB on cards since 2020.
    Triton does not launch a kernel that needs more.
    """
    if triton.knobs.runtime.interpret:
        return _INTERPRETED_BYTES
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])
