"""Large blocks of memory go back to the system once they are free.

glibc raises the size from which it asks the system for each block as blocks of that size are freed;
what long bodies and answers held then stays with the process, in pieces that nothing else fits.
"""

from __future__ import annotations

import ctypes
import sys

# From malloc.h.
_M_MMAP_THRESHOLD = -3
# As glibc has it at first. A number that is set is not raised.
_LARGE_BYTES = 128 * 1024


def return_large_blocks() -> None:
    """Ask glibc for it; elsewhere nothing is done."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
