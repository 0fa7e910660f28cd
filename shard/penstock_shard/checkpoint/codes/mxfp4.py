"""Blocks of MXFP4 -> codes. The format is OCP Microscaling Formats 1.0 (2023), E2M1 with scales
E8M0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock_shard.checkpoint.codes.codes import Codes

# The number of columns that share a scale.
GROUP = 32
# Twice the value of the 4-bit numbers 0 to 7. Numbers from 8 on are the negative values.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_ZERO = 12
_CODES = torch.tensor(
    [_ZERO + each for each in _DOUBLED] + [_ZERO - each for each in _DOUBLED], dtype=torch.uint8
)
_SCALE_BIAS = 127


def mxfp4_codes(blocks: Tensor, scales: Tensor) -> Codes:
    """Read blocks uint8 [N, K / 32, 16], two numbers to a byte with the lower half first, and
    exponents uint8 [N, K / 32].
    """
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1)
    values = _CODES[halves.long()].reshape(len(blocks), -1)
    # Halve the scale, because codes are twice the numbers.
    exponents = scales.to(torch.int32) - _SCALE_BIAS - 1
    floats = torch.ldexp(torch.ones(scales.shape), exponents)
    return Codes(values, floats, None, 8, GROUP, _ZERO)
