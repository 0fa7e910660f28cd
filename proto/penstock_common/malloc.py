"""Returns free memory to the system.

glibc asks the system for each block above a threshold, which it raises when such blocks are freed.
Memory of long bodies and answers then stays with the process, in unusable fragments.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# A constant of malloc.h.
_M_MMAP_THRESHOLD = -3
# glibc's initial threshold. Once a program has set it, glibc no longer raises it.
_LARGE_BYTES = 128 * 1024


def return_large_blocks() -> None:
    """Return each large block once it is free, if glibc is used."""
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_free_memory() -> None:
    """Return memory that is free now, if glibc is used."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
