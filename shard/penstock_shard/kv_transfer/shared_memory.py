"""Memory that processes share by a descriptor, without a name that others could open."""

from __future__ import annotations

import mmap
import os
import tempfile


def make_shared_memory(num_bytes: int) -> int:
    """A descriptor of so many bytes, all zero. The system gives memory as it is written. Raises
    OSError.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("penstock-kv")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def map_shared_memory(descriptor: int) -> memoryview:
    """All of it, for reading and writing. Raises OSError."""
    return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
