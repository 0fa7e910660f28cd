"""Token sampling in Triton in the order of ids, for rows with only a temperature and a least weight
(a floor). The host does not wait for the device.

First, a program for each chunk of a row sums its weights. Then a program for each row finds the
token's chunk, and the token. Weights equal those of plain torch, up to the last bits of the
exponential.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def draw_by_id(logits: Tensor, best: Tensor, settings: Tensor, one: float) -> Tensor:
    """Draw a token for each row of settings float64 [n, 4], as int64 [n]: the first id at which the
    sum of weights from id 0 on exceeds a share of their total.

    A row of settings is: the row's index in logits [N, V], which have any float type; the
    temperature, in the range of float32; the least weight that counts; and the share. Weights are
    integers; a row's largest logit, `best` [N], has weight `one`. If `best` is not finite, any
    token may result.
    """
    columns = logits.shape[1]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, chunks = len(settings), triton.cdiv(columns, _BLOCK)
    sums = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    given = (logits, best, settings, sums)
    sizes = (logits.stride(0), columns, chunks, one, _BLOCK)
    _sum_kernel[(rows, chunks)](*given, *sizes, num_warps=8)
    padded = triton.next_power_of_2(chunks)
    _find_kernel[(rows,)](tokens, *given, *sizes, padded, num_warps=8)
    return tokens


@triton.jit
def _weights_of_chunk(
    logits, best, settings, row, chunk, row_stride, columns, one, block: tl.constexpr
):
    """Return the weights int64 [block] of one chunk of a row; 0 past the row's end."""
    place = tl.load(settings + row * 4).to(tl.int64)
    temperature = tl.load(settings + row * 4 + 1).to(tl.float32)
    floor = tl.load(settings + row * 4 + 2).to(tl.int64)
    largest = tl.load(best + place).to(tl.float32)
    offsets = chunk * block + tl.arange(0, block)
    values = tl.load(
        logits + place * row_stride + offsets, mask=offsets < columns, other=float("-inf")
    )
    # div_rn rounds like IEEE 754 and torch; Triton's plain division does not.
    scaled = tl.div_rn(values.to(tl.float32) - largest, tl.zeros([block], tl.float32) + temperature)
    # NaN weighs 0: converting it to an integer is undefined.
    shares = tl.where(scaled <= 0.0, tl.exp(scaled), 0.0)
    weights = (shares * one).to(tl.int64)
    return tl.where(weights >= floor, weights, 0)


@triton.jit
def _sum_kernel(
    logits, best, settings, sums, row_stride, columns, chunks, one, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    weights = _weights_of_chunk(logits, best, settings, row, chunk, row_stride, columns, one, block)
    tl.store(sums + row * chunks + chunk, tl.sum(weights, axis=0))


@triton.jit
def _find_kernel(
    tokens,
    logits,
    best,
    settings,
    sums,
    row_stride,
    columns,
    chunks,
    one,
    block: tl.constexpr,
    padded: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    order = tl.arange(0, padded)
    parts = tl.load(sums + row * chunks + order, mask=order < chunks, other=0)
    share = tl.load(settings + row * 4 + 3)
    place = (share * tl.sum(parts, axis=0).to(tl.float64)).to(tl.int64)
    passed = (order < chunks) & (tl.cumsum(parts, axis=0) <= place)
    # If no logit has a weight, all chunks are passed, so bound the index.
    chunk = tl.minimum(tl.sum(passed.to(tl.int32), axis=0), chunks - 1)
    before = tl.sum(tl.where(order < chunk, parts, 0), axis=0)
    weights = _weights_of_chunk(logits, best, settings, row, chunk, row_stride, columns, one, block)
    passed = before + tl.cumsum(weights, axis=0) <= place
    token = chunk * block + tl.sum(passed.to(tl.int32), axis=0)
    tl.store(tokens + row, tl.minimum(token, columns - 1).to(tl.int64))
