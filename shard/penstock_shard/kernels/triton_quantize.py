"""A Triton kernel that computes a scale for each token and rounds activations to fp8.

The same bits as `round_in_torch`.
"""

# mypy cannot check kernels: Triton evaluates the annotations of their arguments.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FP8_MAX = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny * 448.0)
# Columns of a row that are read at once.
_BLOCK = 2048


@triton.jit
def _round_kernel(
    x,
    values,
    scales,
    x_stride,
    columns: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, block)
    largest = tl.zeros([block], dtype=tl.float32)
    for start in range(0, columns, block):
        inside = start + offsets < columns
        piece = tl.load(x + row * x_stride + start + offsets, mask=inside, other=0.0)
        largest = tl.maximum(
            largest, tl.abs(piece.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL
        )
    # div_rn rounds as IEEE 754 says; Triton's plain division does not.
    scale = tl.div_rn(tl.maximum(tl.max(largest, axis=0), _SMALLEST), _FP8_MAX)
    # On a device tl.max ignores NaN, but a row with a NaN must give NaN.
    broken = tl.sum((largest != largest).to(tl.int32), axis=0) > 0
    scale = tl.where(broken, float("nan"), scale)
    tl.store(scales + row, scale)
    # The second read of the row hits the cache.
    for start in range(0, columns, block):
        inside = start + offsets < columns
        piece = tl.load(x + row * x_stride + start + offsets, mask=inside, other=0.0)
        quotient = tl.div_rn(piece.to(tl.float32), tl.zeros([block], dtype=tl.float32) + scale)
        quotient = tl.clamp(quotient, -_FP8_MAX, _FP8_MAX)
        tl.store(values + row * columns + start + offsets, quotient.to(tl.float8e4nv), mask=inside)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] with column stride 1 -> e4m3 values [T, K] and scales float32 [T, 1]."""
    tokens, columns = x.shape
    values = torch.empty(tokens, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, 1, device=x.device)
    if tokens:
        block = min(_BLOCK, triton.next_power_of_2(columns))
        _round_kernel[(tokens,)](x, values, scales, x.stride(0), columns, block, num_warps=4)
    return values, scales
