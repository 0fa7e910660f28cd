"""What a device gives to one program. Knows Triton's driver; knows nothing of kernels."""

from __future__ import annotations

import functools

import torch
import triton

# Of the H100 and the H200, which tiles were sized for.
_INTERPRETED_BYTES = 227 << 10


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have there: from 99 to 227 kB on cards since 2020. Triton
    launches nothing that needs more.
    """
    if triton.knobs.runtime.interpret:
        return _INTERPRETED_BYTES
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])
