"""Tokens drawn in Triton, so that nobody has to look at what was computed.

`draw_by_id` is for rows with a temperature and at most a floor under what is kept: logits are read
once, by a program for each chunk of a row, and a program for each row finds the chunk, then the
token in it. A weight is what plain torch makes of a logit, up to the last bits of the exponential.

`draw_unsettled` is for rows whose filters keep more than their window showed. What it gives is what
sorting the whole row would give: two places in the order of the row, largest logit first and lower
id among equals, are found by halving the range of the logits' bits. Rows that are settled cost
nothing, so that it can always be launched.

Knows tensors and nothing else.
"""

# Kernels are no Python: Triton reads annotations of their arguments as code.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of a row that are read at once.
_BLOCK = 4096
# The bits of infinity: no logit below the largest has more.
_MOST_BITS = tl.constexpr(0x7F800000)


def draw_by_id(logits: Tensor, best: Tensor, settings: Tensor, one: float) -> Tensor:
    """A token for each row of settings float64 [n, 4], int64 [n]: the first id at which weights,
    summed up from id 0 on, exceed a share of all.

    A row of settings is the number of a row of logits [N, V], of any float type; its temperature,
    in the range of float32; the least weight that counts; and that share. The largest logit, `best`
    [N], weighs `one`, and weights are whole numbers. Where it is not finite the token is any.
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
    """Weights int64 [block] of a chunk of a row's columns; 0 past the last."""
    place = tl.load(settings + row * 4).to(tl.int64)
    temperature = tl.load(settings + row * 4 + 1).to(tl.float32)
    floor = tl.load(settings + row * 4 + 2).to(tl.int64)
    largest = tl.load(best + place).to(tl.float32)
    offsets = chunk * block + tl.arange(0, block)
    values = tl.load(
        logits + place * row_stride + offsets, mask=offsets < columns, other=float("-inf")
    )
    # Divided as IEEE says and as torch does; the plain division of Triton is not.
    scaled = tl.div_rn(values.to(tl.float32) - largest, tl.zeros([block], tl.float32) + temperature)
    # What is no number has no whole one either: compilers may make of it what they like.
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
    # All are passed only where nothing has a weight.
    chunk = tl.minimum(tl.sum(passed.to(tl.int32), axis=0), chunks - 1)
    before = tl.sum(tl.where(order < chunk, parts, 0), axis=0)
    weights = _weights_of_chunk(logits, best, settings, row, chunk, row_stride, columns, one, block)
    passed = before + tl.cumsum(weights, axis=0) <= place
    token = chunk * block + tl.sum(passed.to(tl.int32), axis=0)
    tl.store(tokens + row, tl.minimum(token, columns - 1).to(tl.int64))


def draw_unsettled(
    scaled: Tensor,
    weights: Tensor,
    goal: Tensor,
    floor: Tensor,
    uniform: Tensor,
    settled: Tensor,
    tokens: Tensor,
) -> None:
    """Put tokens int64 [n] of rows that are not `settled` (bool [n, 1]) over those that are there.

    scaled float32 [n, V], at most 0, decide the order; the first of weights int64 [n, V] that come
    to `goal` int64 [n, 1] are kept, of these the ones not under `floor` int64 [n, 1]; `uniform`
    float64 [n, 1] chooses among them.
    """
    rows, columns = scaled.shape
    _draw_kernel[(rows,)](
        scaled.contiguous(),
        weights.contiguous(),
        goal,
        floor,
        uniform,
        settled.to(torch.int32),
        tokens,
        columns,
        block=_BLOCK,
    )


@triton.jit
def _draw_kernel(
    scaled,
    weights,
    goal,
    floor,
    uniform,
    settled,
    tokens,
    columns,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(settled + row) == 0:
        scaled += row * columns
        weights += row * columns
        wanted = tl.load(goal + row)
        bits = _first_bits(scaled, weights, wanted, columns, block)
        before, weight = _before(scaled, weights, bits, columns, block)
        reached = before + _ties(wanted, before, weight) * weight
        # Those that are not under the floor are the first, too.
        above = _total_above(weights, tl.load(floor + row), columns, block)
        kept = tl.minimum(reached, above)
        place = (tl.load(uniform + row) * kept.to(tl.float64)).to(tl.int64) + 1
        bits = _first_bits(scaled, weights, place, columns, block)
        before, weight = _before(scaled, weights, bits, columns, block)
        number = _ties(place, before, weight)
        tl.store(tokens + row, _tie(scaled, bits, number, columns, block))


@triton.jit
def _bits(scaled, offsets, inside):
    """Whole numbers that rise as the logits fall."""
    values = tl.load(scaled + offsets, mask=inside, other=float("-inf"))
    return (0.0 - values).to(tl.int32, bitcast=True)


@triton.jit
def _first_bits(scaled, weights, wanted, columns, block: tl.constexpr):
    """The least bits such that the weights of all with no more come to `wanted`."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), _MOST_BITS, tl.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        total = tl.zeros([block], dtype=tl.int64)
        for start in range(0, columns, block):
            offsets = start + tl.arange(0, block)
            inside = offsets < columns
            taken = inside & (_bits(scaled, offsets, inside) <= middle)
            total += tl.load(weights + offsets, mask=taken, other=0)
        enough = tl.sum(total) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def _before(scaled, weights, bits, columns, block: tl.constexpr):
    """The weight of all with less bits, and that of one with these."""
    total = tl.zeros([block], dtype=tl.int64)
    one = tl.zeros([block], dtype=tl.int64)
    for start in range(0, columns, block):
        offsets = start + tl.arange(0, block)
        inside = offsets < columns
        own = _bits(scaled, offsets, inside)
        weight = tl.load(weights + offsets, mask=inside, other=0)
        total += tl.where(inside & (own < bits), weight, 0)
        one = tl.maximum(one, tl.where(inside & (own == bits), weight, 0))
    # Not 0 unless the logits are no numbers.
    return tl.sum(total), tl.maximum(tl.max(one, axis=0), 1)


@triton.jit
def _ties(wanted, before, weight):
    """How many of one weight it takes to come from `before` to `wanted`."""
    return (wanted - before + weight - 1) // weight


@triton.jit
def _total_above(weights, floor, columns, block: tl.constexpr):
    total = tl.zeros([block], dtype=tl.int64)
    for start in range(0, columns, block):
        offsets = start + tl.arange(0, block)
        weight = tl.load(weights + offsets, mask=offsets < columns, other=0)
        total += tl.where(weight >= floor, weight, 0)
    return tl.sum(total)


@triton.jit
def _tie(scaled, bits, number, columns, block: tl.constexpr):
    """The id of the one with this number, from 1, among those with these bits; 0 if it is not
    there.
    """
    found = tl.zeros([block], dtype=tl.int64)
    passed = tl.full((), 0, tl.int64)
    for start in range(0, columns, block):
        offsets = start + tl.arange(0, block)
        inside = offsets < columns
        same = (inside & (_bits(scaled, offsets, inside) == bits)).to(tl.int64)
        hit = (same == 1) & (tl.cumsum(same, axis=0) + passed == number)
        found += tl.where(hit, offsets, 0)
        passed += tl.sum(same)
    return tl.sum(found)
