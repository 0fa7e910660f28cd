"""Memory that was freed is the system's again."""

from __future__ import annotations

import subprocess
import sys

import pytest

_GROWN = """
import psutil
from penstock_common.malloc import return_large_blocks
return_large_blocks()
rss = psutil.Process().memory_info
before = rss().rss
del (long := [bytearray(20_000_000)])[0]
blocks = [(bytearray(1_000_000), bytearray(2000)) for _ in range(100)]
kept = [small for _, small in blocks]
del blocks
print((rss().rss - before) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone")
def test_what_long_bodies_held_does_not_stay_with_the_process() -> None:
    ran = subprocess.run([sys.executable, "-c", _GROWN], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 10


_FREED = """
import psutil
from penstock_common.malloc import return_free_memory
rss = psutil.Process().memory_info
kept = [(bytearray(50_000), bytearray(50_000)) for _ in range(400)]
last = bytearray(50_000)
kept = [small for _, small in kept]
before = rss().rss
return_free_memory()
print((before - rss().rss) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone")
def test_what_a_start_freed_is_given_back() -> None:
    ran = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    assert float(ran.stdout) > 10
