"""Philox-4x32-10: one uniform number for each (seed, position).

After Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). It has
no state, so a position's token is the same in any batch and after any restart.
"""

from __future__ import annotations

from collections import abc
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
# Added to the two key words after each round (golden ratio and sqrt(3) - 1, as 32-bit fractions).
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]
Numbers: TypeAlias = NDArray[np.uint64] | NDArray[np.int64]


def philox4x32(counter: abc.Sequence[Words], key: abc.Sequence[Words]) -> tuple[Words, ...]:
    """Turn four counter words [n] and two key words, each below 2**32, into four random words
    [n].
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + np.uint64(_WEYL[0])) & _LOW
        k1 = (k1 + np.uint64(_WEYL[1])) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seeds: abc.Sequence[int] | Numbers, positions: abc.Sequence[int] | Numbers
) -> NDArray[np.float64]:
    """Return a number in [0, 1) with 53 random bits for each (seed, position), both below 2**64.

    The key is the seed, the counter the position (two low words; the high two are 0).
    """
    seed = np.array(seeds, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(position)
    words = philox4x32(
        (position & _LOW, position >> _HALF, zero, zero), (seed & _LOW, seed >> _HALF)
    )
    bits = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
