"""Has memory that is free given back to the system.

glibc raises the size from which it asks the system for each block as blocks of that size are freed;
what long bodies and answers held then stays with the process, in pieces that nothing else fits.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# From malloc.h.
_M_MMAP_THRESHOLD = -3
# As glibc has it at first. A number that is set is not raised.
_LARGE_BYTES = 128 * 1024


def return_large_blocks() -> None:
    """Have each large block given back once it is free; outside of glibc nothing is done."""
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_free_memory() -> None:
    """Give back what is free now, as after a start; outside of glibc nothing is done."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
