"""Triton code that rounds activations to fp8 with a scale for each token: a kernel, and functions
for other kernels. Results equal those of `round_in_torch` bit for bit.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FP8_MAX = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny * 448.0)
_BLOCK = 2048

# e4m3 values [T, K] and a scale for each row, float32 [T, 1].
Fp8Rows = tuple[Tensor, Tensor]


@triton.jit
def fp8_scale(largest):
    """Return a row's scale. `largest` has absolute values of the row: the largest, and any NaN."""
    # div_rn rounds like IEEE 754; Triton's plain division does not.
    scale = tl.div_rn(tl.maximum(tl.max(largest, axis=0), _SMALLEST), _FP8_MAX)
    # On a device tl.max ignores NaN, but a row with a NaN must give NaN.
    broken = tl.sum((largest != largest).to(tl.int32), axis=0) > 0
    return tl.where(broken, float("nan"), scale)


@triton.jit
def in_fp8(values, scale):
    """Convert a row's float32 values to e4m3."""
    quotient = tl.div_rn(values, tl.zeros_like(values) + scale)
    return tl.clamp(quotient, -_FP8_MAX, _FP8_MAX).to(tl.float8e4nv)


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
    scale = fp8_scale(largest)
    tl.store(scales + row, scale)
    # The second read hits the cache.
    for start in range(0, columns, block):
        inside = start + offsets < columns
        piece = tl.load(x + row * x_stride + start + offsets, mask=inside, other=0.0)
        rounded = in_fp8(piece.to(tl.float32), scale)
        tl.store(values + row * columns + start + offsets, rounded, mask=inside)


def empty_fp8_rows(tokens: int, columns: int, device: torch.device) -> Fp8Rows:
    values = torch.empty(tokens, columns, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(tokens, 1, device=device)


def round_rows(x: Tensor) -> Fp8Rows:
    """Round x [T, K], with column stride 1, to fp8."""
    tokens, columns = x.shape
    values, scales = empty_fp8_rows(tokens, columns, x.device)
    if tokens:
        block = min(_BLOCK, triton.next_power_of_2(columns))
        _round_kernel[(tokens,)](x, values, scales, x.stride(0), columns, block, num_warps=4)
    return values, scales
