"""Memory that processes share by a descriptor, without a name that others could open."""

from __future__ import annotations

import mmap
import os
import tempfile


def make_shared_memory(num_bytes: int) -> int:
    """Make `num_bytes` zero bytes; memory is used once it is written. Returns a descriptor. Raises
    OSError if the system refuses.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("penstock-kv")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def map_shared_memory(descriptor: int) -> memoryview:
    """Map the whole memory for reading and writing. Raises OSError."""
    return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
