"""Token sampling in Triton, so that the host need not wait for the device to see any values.

`draw_by_id` is for rows with a temperature and at most a least weight (a floor): a program for each
chunk of a row sums up its weights, then a program for each row finds the chunk, and the token in
it. Weights are those of plain torch, up to the last bits of the exponential.

`draw_unsettled` is for rows whose filters keep more logits than the sampler's window of the largest
ones. It gives what sorting the whole row would give: two places in the row's order (largest logit
first, lower id among equals) are found by bisection over the logits' bits. Rows that are settled
cost next to nothing, so that it can always be launched.
"""

# mypy cannot check kernels: Triton evaluates the annotations of their arguments.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of a row that are read at once.
_BLOCK = 4096
# The bits of infinity: upper end of the bisection, since no negated logit has more.
_MOST_BITS = tl.constexpr(0x7F800000)


def draw_by_id(logits: Tensor, best: Tensor, settings: Tensor, one: float) -> Tensor:
    """A token for each row of settings float64 [n, 4], as int64 [n]: the first id at which the sum
    of weights from id 0 on exceeds a share of their total.

    A row of settings is: the index of its row in logits [N, V], which have any float type; the
    temperature, in the range of float32; the least weight that counts; and the share. Weights are
    integers; the largest logit of a row, `best` [N], weighs `one`. Where `best` is not finite, any
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
    """Weights int64 [block] of a chunk of a row's columns; 0 past the last."""
    place = tl.load(settings + row * 4).to(tl.int64)
    temperature = tl.load(settings + row * 4 + 1).to(tl.float32)
    floor = tl.load(settings + row * 4 + 2).to(tl.int64)
    largest = tl.load(best + place).to(tl.float32)
    offsets = chunk * block + tl.arange(0, block)
    values = tl.load(
        logits + place * row_stride + offsets, mask=offsets < columns, other=float("-inf")
    )
    # div_rn rounds as IEEE 754 says, as torch does; Triton's plain division does not.
    scaled = tl.div_rn(values.to(tl.float32) - largest, tl.zeros([block], tl.float32) + temperature)
    # Converting NaN to an integer is undefined, so NaN weighs 0.
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
    # Bounded because all chunks are passed if no logit has a weight.
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
    """Overwrite tokens int64 [n] in rows that are not `settled` (bool [n, 1]).

    scaled float32 [n, V], at most 0, are logits that give the order. The first weights int64 [n, V]
    in this order whose sum reaches `goal` int64 [n, 1] are kept, without those under `floor` int64
    [n, 1]; `uniform` float64 [n, 1] chooses among them.
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
        # Weights at or above the floor come first in the order too, so the smaller sum is kept.
        above = _total_above(weights, tl.load(floor + row), columns, block)
        kept = tl.minimum(reached, above)
        place = (tl.load(uniform + row) * kept.to(tl.float64)).to(tl.int64) + 1
        bits = _first_bits(scaled, weights, place, columns, block)
        before, weight = _before(scaled, weights, bits, columns, block)
        number = _ties(place, before, weight)
        tl.store(tokens + row, _tie(scaled, bits, number, columns, block))


@triton.jit
def _bits(scaled, offsets, inside):
    """The bits of the negated logits as int32: integers that rise as the logits fall."""
    values = tl.load(scaled + offsets, mask=inside, other=float("-inf"))
    return (0.0 - values).to(tl.int32, bitcast=True)


@triton.jit
def _first_bits(scaled, weights, wanted, columns, block: tl.constexpr):
    """The least bits for which the weights of all logits with these bits or less sum up to
    `wanted`.
    """
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
    """The summed weight of all logits with smaller bits, and the weight of one with these bits."""
    total = tl.zeros([block], dtype=tl.int64)
    one = tl.zeros([block], dtype=tl.int64)
    for start in range(0, columns, block):
        offsets = start + tl.arange(0, block)
        inside = offsets < columns
        own = _bits(scaled, offsets, inside)
        weight = tl.load(weights + offsets, mask=inside, other=0)
        total += tl.where(inside & (own < bits), weight, 0)
        one = tl.maximum(one, tl.where(inside & (own == bits), weight, 0))
    # The weight is 0 only for NaN logits; at least 1, as `_ties` divides by it.
    return tl.sum(total), tl.maximum(tl.max(one, axis=0), 1)


@triton.jit
def _ties(wanted, before, weight):
    """How many tied logits of this weight it takes to get from `before` to `wanted`."""
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
    """The id of the `number`-th logit, from 1, of those with these bits; 0 if there are fewer."""
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
