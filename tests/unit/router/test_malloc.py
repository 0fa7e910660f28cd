"""Memory that was freed is the system's again."""

from __future__ import annotations

import subprocess
import sys

import pytest

_GROWN = """
import psutil
from penstock_router.malloc import return_large_blocks
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
