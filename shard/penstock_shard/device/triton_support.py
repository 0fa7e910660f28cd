"""Tells whether Triton kernels may be launched on a type of device.

The package must be installed, and the check at load must have found no fault. The check reports its
result to this module.
"""

from __future__ import annotations

import functools
import importlib.util

_MISSING = "the triton package is not installed; torch for CUDA brings it along"

_faults: dict[str, str] = {}


@functools.cache
def is_installed() -> bool:
    """Tell whether the triton package is installed, even if its kernels compute wrongly."""
    return importlib.util.find_spec("triton") is not None


def remember(device_type: str, fault: str | None) -> None:
    """Record the fault that the check of a device type found, if any."""
    if fault is None:
        _faults.pop(device_type, None)
    else:
        _faults[device_type] = fault


def fault_on(device_type: str) -> str | None:
    """The reason why no kernel may be launched on a type of device, if any."""
    return _faults.get(device_type) if is_installed() else _MISSING
