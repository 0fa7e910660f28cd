"""Which levels of the CPU kernels tests compile: each takes a processor seconds."""

from __future__ import annotations

import os

from penstock_shard.kernels.build_cpu import supported_levels

# Each is the other but for one instruction, which the machine may have.
_ALIKE = {"avx512": "avx512_bf16"}


def only_in_soak(level: str) -> bool:
    """Whether another level of this machine stands for it in `make test`."""
    return _ALIKE.get(level) in supported_levels()


def levels_here() -> tuple[str, ...]:
    """Levels of this machine, best first: all of them in `make soak`."""
    levels = supported_levels()
    if os.environ.get("PENSTOCK_SOAK"):
        return levels
    return tuple(level for level in levels if not only_in_soak(level))
