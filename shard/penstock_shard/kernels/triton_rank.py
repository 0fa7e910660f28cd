"""Token sampling in Triton in the order of the logits: with top-k, top-p and min-p.

A row's order is: largest logit first, lower id among equals. Weights are whole numbers, so that
their sums are the same in any order, and a token is bit for bit the one that sorting would give.

One program for each row looks for up to three places in its order: where top-k ends, where top-p
ends, and where the token is. It sums up the weights under a few rungs between two logits, goes on
between the two rungs that have the place between them, and lists the logits there as soon as they
are few. So a row with few likely tokens is read twice, and a flat one five times.
"""

# mypy cannot check kernels: Triton evaluates the annotations of their arguments.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of a row that are read at once.
_BLOCK = 2048
# Logits of a row that are listed at most; a longer row is not read often.
_LISTED = 16384
_RUNGS = tl.constexpr(8)
# The bits of infinity, since no negated logit has more; and those past the end of a row.
_MOST_BITS = tl.constexpr(0x7F800000)
_OUTSIDE = tl.constexpr(0x7FFFFFFF)


def draw_ranked(logits: Tensor, best: Tensor, settings: Tensor, one: float) -> Tensor:
    """A token for each row of settings float64 [n, 6], as int64 [n].

    A row of settings is: the index of its row in logits [N, V], which have any float type; the
    temperature, in the range of float32; top-k, or 0; top-p; the least weight that min-p keeps; and
    which share of the kept weights precedes the token. Weights are integers; the largest logit of a
    row, `best` [N], weighs `one`. Where `best` is not finite, any token may result.
    """
    rows, columns, device = len(settings), logits.shape[1], logits.device
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    # Logits by temperature, and their exponentials: torch's, so that weights are as elsewhere.
    table = torch.empty(2, rows, columns, device=device)
    grid = (rows, triton.cdiv(columns, _BLOCK))
    _scale_kernel[grid](table, logits, best, settings, logits.stride(0), columns, _BLOCK)
    torch.exp(table[0], out=table[1])
    # The same of what is listed, and ids.
    listed = torch.empty(rows, 3, _LISTED, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    _rank_kernel[(rows,)](
        tokens, table, rows * columns, settings, listed, columns, one, _LISTED, _BLOCK, num_warps=16
    )
    return tokens


@triton.jit
def _scale_kernel(scaled, logits, best, settings, row_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(settings + row * 6).to(tl.int64)
    temperature = tl.load(settings + row * 6 + 1).to(tl.float32)
    largest = tl.load(best + place).to(tl.float32)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    values = tl.load(logits + place * row_stride + offsets, mask=inside, other=0.0)
    # div_rn rounds as IEEE 754 says, as torch does; Triton's plain division does not.
    below = values.to(tl.float32) - largest
    divided = tl.div_rn(below, tl.zeros([BLOCK], tl.float32) + temperature)
    tl.store(scaled + row * columns + offsets, divided, mask=inside)


# The distance of shares from logits depends on the number of rows.
@triton.jit(do_not_specialize=("apart",))
def _rank_kernel(
    tokens,
    table,
    apart,
    settings,
    listed,
    columns,
    one,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    settings += row * 6
    top_k = tl.load(settings + 2).to(tl.int64)
    top_p = tl.load(settings + 3)
    listed += row * (3 * LISTED)
    # Where all logits are that may be kept: in the row, then perhaps in the list. And where those
    # are that are tied with the one last looked for, their bits, and which of them it is.
    values, apart, count = table + row * columns, apart, columns
    found, distance, size = values, apart, count
    bits, number = _ends()[1], tl.full((), 1, tl.int64)
    kept = tl.full((), 0, tl.int64)
    sums = tl.zeros([_RUNGS], tl.int64)
    # The end of what top-k keeps, the end of what top-p keeps, the token.
    for stage in range(tl.where(top_k > 0, 0, 1), 3):
        by_count = stage == 0
        wanted = top_k
        if stage < 2:
            sums = _first_sums(values, apart, count, by_count, one, BLOCK)
        if stage == 1:
            if top_k == 0:
                kept = tl.max(sums, axis=0)
            wanted = tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64)
        if stage == 2:
            kept = _above(kept, values, apart, count, tl.load(settings + 4), one, BLOCK)
            wanted = (tl.load(settings + 5) * kept.to(tl.float64)).to(tl.int64) + 1
        if (stage != 1) | (top_p < 1.0):
            bits, before, found, distance, size, is_near = _find(
                values, apart, count, listed, sums, wanted, by_count, one, LISTED, BLOCK
            )
            heavier, weight = _before(found, distance, size, bits, one, BLOCK)
            if by_count:
                kept = heavier + (wanted - before) * weight
            else:
                number = _ties(wanted, before, weight)
                kept = before + number * weight
            if is_near:
                values, apart, count = found, distance, size
    token = _tie(found, distance, size, bits, number, one, BLOCK)
    if size < columns:
        token = tl.load(listed + 2 * LISTED + token).to(tl.int32, bitcast=True)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _read(values, apart, start, count, one, BLOCK: tl.constexpr):
    """The bits of negated logits as int32, integers that rise as the logits fall; and weights."""
    offsets = start + tl.arange(0, BLOCK)
    inside = offsets < count
    value = tl.load(values + offsets, mask=inside, other=0.0)
    share = tl.load(values + apart + offsets, mask=inside, other=0.0)
    # NaN comes last, and weighs nothing: converting it to an integer is undefined.
    is_number = value <= 0.0
    bits = tl.where(is_number, (0.0 - value).to(tl.int32, bitcast=True), _MOST_BITS)
    weights = tl.where(is_number, share * one, 0.0).to(tl.int64)
    return tl.where(inside, bits, _OUTSIDE), weights


@triton.jit
def _rung(index: tl.constexpr, low, high, is_first):
    """The bits of a rung between two others, which the last one is equal to: evenly between their
    logits. Those of the first ladder are the closer together the more their logits weigh.
    """
    if index == _RUNGS - 1:
        return high
    bottom = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    # Of an endless stretch only as much as has weights, or a good part.
    top = tl.minimum(tl.maximum(16.0 * bottom, 32.0), 3.4028234663852886e38)
    top = tl.where(high == _MOST_BITS, top, high.to(tl.float32, bitcast=True))
    depth = bottom + (top - bottom) * ((index + 1) / _RUNGS)
    depth = tl.where(is_first, index * index / 6.0, depth)
    bits = depth.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(bits, low + 1), high)


@triton.jit
def _sums(values, apart, count, low, high, is_first, by_count, one, BLOCK: tl.constexpr):
    """How much the logits weigh, or how many there are, down to each rung; int64 [rungs]."""
    rungs = [_rung(index, low, high, is_first) for index in (0, 1, 2, 3, 4, 5, 6, 7)]
    # Each thread sums up its own, so that threads need not wait for each other.
    totals = [tl.zeros([BLOCK], tl.int64) for _ in (0, 1, 2, 3, 4, 5, 6, 7)]
    for start in range(0, count, BLOCK):
        bits, weights = _read(values, apart, start, count, one, BLOCK)
        weights = tl.where(by_count, 1, weights)
        totals = [
            totals[index] + tl.where(bits <= rungs[index], weights, 0)
            for index in (0, 1, 2, 3, 4, 5, 6, 7)
        ]
    sums = tl.zeros([_RUNGS], tl.int64)
    for index in tl.static_range(_RUNGS):
        sums += tl.where(tl.arange(0, _RUNGS) == index, tl.sum(totals[index], axis=0), 0)
    return sums


@triton.jit
def _first_sums(values, apart, count, by_count, one, BLOCK: tl.constexpr):
    low, high = _ends()
    return _sums(values, apart, count, low, high, True, by_count, one, BLOCK)


@triton.jit
def _ends():
    """Bits that are less than any logit's, and those that none exceeds."""
    return tl.full((), -1, tl.int32), tl.full((), _MOST_BITS, tl.int32)


@triton.jit
def _step(sums, wanted, low, high, before, fewer, is_first, by_count, one):
    """Two rungs, one above the other, between which the sums reach what is wanted: their bits, the
    sum at the upper one, and how many logits there are at most down to each; `fewer` are those down
    to `low`.
    """
    above, most = before, fewer
    upper, lower = low, low
    is_open = wanted >= 0
    for index in tl.static_range(_RUNGS):
        if is_open:
            rung = _rung(index, low, high, is_first)
            total = tl.max(tl.where(tl.arange(0, _RUNGS) == index, sums, 0), axis=0)
            before, fewer, upper = above, most, lower
            above, lower = total, rung
            most += (total - before).to(tl.float32) / _least(rung, by_count, one)
            is_open = total < wanted
    return upper, lower, before, fewer, most


@triton.jit
def _least(bits, by_count, one):
    """A little less than the weight of a logit with these bits; 1 where weights do not count."""
    weight = tl.exp(0.0 - bits.to(tl.float32, bitcast=True)) * one * 0.999 - 1.0
    return tl.where(by_count, 1.0, tl.maximum(weight, 0.0))


@triton.jit
def _find(
    values,
    apart,
    count,
    listed,
    sums,
    wanted,
    by_count,
    one,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least bits for which the sum of all logits with these bits or less reaches `wanted`, with
    the sum of those before; `sums` are those of the first ladder.

    Then where logits with these bits are: in the row, or in the list; and whether all that come
    before them are there too.
    """
    low, high = _ends()
    before = tl.full((), 0, tl.int64)
    fewer = tl.full((), 0.0, tl.float32)
    low, high, before, fewer, most = _step(
        sums, wanted, low, high, before, fewer, True, by_count, one
    )
    # What precedes the list.
    skipped = tl.full((), 0, tl.int64)
    is_near = count < 0
    is_open = count >= 0
    while is_open:
        if count > LISTED:
            is_near = most < LISTED
            # Those before are weighed too where logits are counted.
            if is_near | ((most - fewer < LISTED) & (by_count == 0)):
                after = tl.where(is_near, -1, low)
                size = _list(listed, values, apart, count, after, high, LISTED, BLOCK)
                skipped = tl.where(is_near, 0, before)
                values, apart, count = listed, LISTED, size
        is_open = high - low > 1
        if is_open:
            sums = _sums(values, apart, count, low, high, False, by_count, one, BLOCK) + skipped
            low, high, before, fewer, most = _step(
                sums, wanted, low, high, before, fewer, False, by_count, one
            )
    return high, before, values, apart, count, is_near


@triton.jit
def _list(listed, values, apart, count, low, high, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """List the logits with bits above `low`, up to `high`, in the order of their ids; how many."""
    size = tl.full((), 0, tl.int32)
    ids = (listed + 2 * LISTED).to(tl.pointer_type(tl.int32), bitcast=True)
    # Four parts, of four logits for each thread, are numbered at once, in four fields of a number.
    field = tl.arange(0, 4)[:, None, None]
    parts = field * BLOCK + tl.arange(0, BLOCK // 4)[None, :, None] * 4
    parts += tl.arange(0, 4)[None, None, :]
    for start in range(0, count, 4 * BLOCK):
        value = tl.load(values + start + parts, mask=start + parts < count, other=1.0)
        bits = tl.where(value <= 0.0, (0.0 - value).to(tl.int32, bitcast=True), _OUTSIDE)
        chosen = (bits > low) & (bits <= high)
        within = tl.cumsum(chosen.to(tl.int32), axis=2)
        counts = tl.sum(chosen.to(tl.int32), axis=2)
        own = tl.sum(counts.to(tl.int64) << (16 * tl.arange(0, 4)[:, None]), axis=0)
        # In each field: what is chosen in the parts before it.
        ends = tl.sum(own, axis=0) * 0x0001000100010001
        before = tl.cumsum(own, axis=0) - own + (ends << 16)
        places = size - 1 + within
        places += ((before[None, :, None] >> (16 * field)) & 0xFFFF).to(tl.int32)
        tl.store(ids + places, start + parts, mask=chosen & (places < LISTED))
        size += ((ends >> 48) & 0xFFFF).to(tl.int32)
    size = tl.minimum(size, LISTED)
    # Each thread reads what others have written.
    tl.debug_barrier()
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < size
        own = tl.load(ids + offsets, mask=inside, other=0)
        value = tl.load(values + own, mask=inside, other=0.0)
        share = tl.load(values + apart + own, mask=inside, other=0.0)
        tl.store(listed + offsets, value, mask=inside)
        tl.store(listed + LISTED + offsets, share, mask=inside)
    tl.debug_barrier()
    return size


@triton.jit
def _before(values, apart, count, bits, one, BLOCK: tl.constexpr):
    """The summed weight of all logits with smaller bits, and the weight of one with these bits."""
    total = tl.zeros([BLOCK], dtype=tl.int64)
    weight = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, count, BLOCK):
        own, weights = _read(values, apart, start, count, one, BLOCK)
        total += tl.where(own < bits, weights, 0)
        weight = tl.maximum(weight, tl.where(own == bits, weights, 0))
    return tl.sum(total, axis=0), tl.max(weight, axis=0)


@triton.jit
def _ties(wanted, before, weight):
    """How many tied logits of this weight it takes to get from `before` to `wanted`."""
    # Only logits that are no numbers weigh nothing here.
    weight = tl.maximum(weight, 1)
    return (wanted - before + weight - 1) // weight


@triton.jit
def _above(kept, values, apart, count, floor, one, BLOCK: tl.constexpr):
    """What is kept of so much weight without logits that weigh less than the floor."""
    total = tl.zeros([BLOCK], dtype=tl.int64)
    if floor > 0.0:
        for start in range(0, count, BLOCK):
            _, weights = _read(values, apart, start, count, one, BLOCK)
            total += tl.where(weights >= floor.to(tl.int64), weights, 0)
        # Those at or above it come first in the order too, so the smaller sum is kept.
        kept = tl.minimum(kept, tl.sum(total, axis=0))
    return kept


@triton.jit
def _tie(values, apart, count, bits, number, one, BLOCK: tl.constexpr):
    """The place of the `number`-th logit, from 1, of those with these bits; 0 if there are none."""
    found = tl.full((), 0, tl.int32)
    passed = tl.full((), 0, tl.int64)
    for start in range(0, count, BLOCK):
        own, _ = _read(values, apart, start, count, one, BLOCK)
        same = (own == bits).to(tl.int32)
        hit = (same == 1) & (tl.cumsum(same, axis=0) + passed == number)
        found += tl.sum(tl.where(hit, start + tl.arange(0, BLOCK), 0), axis=0)
        passed += tl.sum(same, axis=0)
    return found
