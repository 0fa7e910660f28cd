"""One Triton kernel that draws tokens of rows whose filters keep more than their window showed.

What it gives is what sorting the whole row would give: two places in the order of the row, largest
logit first and lower id among equals, are found by halving the range of the logits' bits. Rows that
are settled cost nothing, so that it can always be launched and nobody has to look whether any is
not. Knows tensors and nothing else.
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
        scaled,
        weights,
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
