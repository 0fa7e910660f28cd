"""The levels of the CPU kernels that tests compile. Each takes a processor several seconds."""

from __future__ import annotations

import os

from penstock_shard.kernels.build_cpu import supported_levels

# Levels that differ in a single instruction, which the machine may have.
_ALIKE = {"avx512": "avx512_bf16"}


def only_in_soak(level: str) -> bool:
    """True if another level of this machine stands for this one in `make test`."""
    return _ALIKE.get(level) in supported_levels()


def levels_here() -> tuple[str, ...]:
    """Return the levels of this machine to compile, best first: all of them in `make soak`."""
    levels = supported_levels()
    if os.environ.get("PENSTOCK_SOAK"):
        return levels
    return tuple(level for level in levels if not only_in_soak(level))
