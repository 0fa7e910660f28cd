"""Whether Triton's kernels may be launched on a device: one answer, for all that have any.

They may where the package is installed and the check at load, which reports here, found nothing
wrong. Knows nothing of torch, of kernels or of how they are checked.
"""

from __future__ import annotations

import functools
import importlib.util

_MISSING = "the triton package is not installed; torch for CUDA brings it along"

# What the last check of a kind of device found.
_faults: dict[str, str] = {}


@functools.cache
def is_installed() -> bool:
    """Whether there is a Triton, right or wrong."""
    return importlib.util.find_spec("triton") is not None


def remember(device_type: str, fault: str | None) -> None:
    """Keep what the check of a device found; None is nothing."""
    if fault is None:
        _faults.pop(device_type, None)
    else:
        _faults[device_type] = fault


def fault_on(device_type: str) -> str | None:
    """Why no kernel may be launched on such a device, in words; None if any may."""
    return _faults.get(device_type) if is_installed() else _MISSING
