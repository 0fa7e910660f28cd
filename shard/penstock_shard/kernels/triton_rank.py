"""Token sampling in Triton in the order of the logits: with top-k, top-p and min-p.

A row's order is largest logit first; among equal logits, lowest id first. Weights are whole
numbers, so their sums do not depend on the order, and the drawn token is the same as with sorting.

One program for each row looks for up to three places in the row's order: the end of top-k, the end
of top-p, and the token. It divides the range of logits by a few thresholds, the rungs, and sums the
weights of all logits above each rung. Then it divides the range between the two rungs around the
place, until the range has few logits, which are listed. So a row with few likely tokens is read
twice, and a flat row five times.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
# At most this many logits of a row are listed. If there are more, the row is read a few more times.
_LISTED = 16384
_RUNGS = tl.constexpr(8)
# The bits of infinity, which no negated logit exceeds; and the bits past a row's end.
_MOST_BITS = tl.constexpr(0x7F800000)
_OUTSIDE = tl.constexpr(0x7FFFFFFF)


def draw_ranked(logits: Tensor, best: Tensor, settings: Tensor, one: float) -> Tensor:
    """Draw a token for each row of settings float64 [n, 6], as int64 [n].

    A row of settings is: the row's index in logits [N, V], which have any float type; the
    temperature, in the range of float32; top-k, or 0; top-p; the least weight that min-p keeps; and
    the share of the kept weights that precedes the token. Weights are integers; a row's largest
    logit, `best` [N], weighs `one`. If `best` is not finite, any token may result.
    """
    rows, columns, device = len(settings), logits.shape[1], logits.device
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    # torch takes the exponentials, so that weights are the same as elsewhere.
    table = torch.empty(2, rows, columns, device=device)
    grid = (rows, triton.cdiv(columns, _BLOCK))
    _scale_kernel[grid](table, logits, best, settings, logits.stride(0), columns, _BLOCK)
    torch.exp(table[0], out=table[1])
    # Scaled logits, exponentials and ids of listed logits.
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
    # div_rn rounds like IEEE 754 and torch; Triton's plain division does not.
    below = values.to(tl.float32) - largest
    divided = tl.div_rn(below, tl.zeros([BLOCK], tl.float32) + temperature)
    tl.store(scaled + row * columns + offsets, divided, mask=inside)


# `apart`, the distance from scaled logits to exponentials, depends on the number of rows.
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
    # `values`, `apart` and `count` tell where the logits that may be kept are: in the row, later
    # perhaps in the list. `found`, `distance` and `size` tell where the logits tied with the last
    # found logit are. They have these `bits`; that logit's number among them is `number`.
    values, apart, count = table + row * columns, apart, columns
    found, distance, size = values, apart, count
    bits, number = _ends()[1], tl.full((), 1, tl.int64)
    kept = tl.full((), 0, tl.int64)
    sums = tl.zeros([_RUNGS], tl.int64)
    # Stages: end of top-k, end of top-p, token.
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
    """Return the bits of negated logits, as int32, and the weights. Bits rise as logits fall."""
    offsets = start + tl.arange(0, BLOCK)
    inside = offsets < count
    value = tl.load(values + offsets, mask=inside, other=0.0)
    share = tl.load(values + apart + offsets, mask=inside, other=0.0)
    # NaN comes last, with weight 0: converting it to an integer is undefined.
    is_number = value <= 0.0
    bits = tl.where(is_number, (0.0 - value).to(tl.int32, bitcast=True), _MOST_BITS)
    weights = tl.where(is_number, share * one, 0.0).to(tl.int64)
    return tl.where(inside, bits, _OUTSIDE), weights


@triton.jit
def _rung(index: tl.constexpr, low, high, is_first):
    """Return the bits of a rung between `low` and `high`; the last rung is `high`. Rungs are evenly
    spaced by logit. In the first division, they are closer where logits weigh more.
    """
    if index == _RUNGS - 1:
        return high
    bottom = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    # A range without an end ends at 32, beyond which logits weigh nothing, or at 16 times its begin
    # if that is more.
    top = tl.minimum(tl.maximum(16.0 * bottom, 32.0), 3.4028234663852886e38)
    top = tl.where(high == _MOST_BITS, top, high.to(tl.float32, bitcast=True))
    depth = bottom + (top - bottom) * ((index + 1) / _RUNGS)
    depth = tl.where(is_first, index * index / 6.0, depth)
    bits = depth.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(bits, low + 1), high)


@triton.jit
def _sums(values, apart, count, low, high, is_first, by_count, one, BLOCK: tl.constexpr):
    """Sum the weights, or count the logits, from the largest logit down to each rung; int64
    [rungs].
    """
    rungs = [_rung(index, low, high, is_first) for index in (0, 1, 2, 3, 4, 5, 6, 7)]
    # Each thread sums its own values, so threads need not wait for each other.
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
    """Return bits below any logit's, and the largest bits."""
    return tl.full((), -1, tl.int32), tl.full((), _MOST_BITS, tl.int32)


@triton.jit
def _step(sums, wanted, low, high, before, fewer, is_first, by_count, one):
    """Find the neighbouring rungs between which the sums reach `wanted`. Return their bits, the sum
    down to the upper rung, and upper bounds on the number of logits down to each. `fewer` is the
    bound for `low`.
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
    """Return a little less than the weight of a logit with these bits; 1 if logits are counted."""
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
    """Find the smallest bits at which the sum over all logits with at most these bits reaches
    `wanted`. Return them, and the sum over logits with smaller bits. `sums` are those of the first
    division.

    Also return where the logits with these bits are, in the row or in the list, and true if all
    logits with smaller bits are there too.
    """
    low, high = _ends()
    before = tl.full((), 0, tl.int64)
    fewer = tl.full((), 0.0, tl.float32)
    low, high, before, fewer, most = _step(
        sums, wanted, low, high, before, fewer, True, by_count, one
    )
    # Weight of the logits before the list.
    skipped = tl.full((), 0, tl.int64)
    is_near = count < 0
    is_open = count >= 0
    while is_open:
        if count > LISTED:
            is_near = most < LISTED
            # If logits are counted, the weights of earlier logits are needed later, so list these
            # logits too.
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
    """List the logits with bits above `low`, up to `high`, in the order of ids. Return their
    number.
    """
    size = tl.full((), 0, tl.int32)
    ids = (listed + 2 * LISTED).to(tl.pointer_type(tl.int32), bitcast=True)
    # Assign places to the chosen logits of four parts at once. Each thread has four logits of a
    # part. Each part is counted in one of four fields of an integer.
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
        # Add to each field the number of logits chosen in earlier parts.
        ends = tl.sum(own, axis=0) * 0x0001000100010001
        before = tl.cumsum(own, axis=0) - own + (ends << 16)
        places = size - 1 + within
        places += ((before[None, :, None] >> (16 * field)) & 0xFFFF).to(tl.int32)
        tl.store(ids + places, start + parts, mask=chosen & (places < LISTED))
        size += ((ends >> 48) & 0xFFFF).to(tl.int32)
    size = tl.minimum(size, LISTED)
    # Threads read values that others have written.
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
    """Return the summed weight of logits with smaller bits, and the weight of a logit with these
    bits.
    """
    total = tl.zeros([BLOCK], dtype=tl.int64)
    weight = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, count, BLOCK):
        own, weights = _read(values, apart, start, count, one, BLOCK)
        total += tl.where(own < bits, weights, 0)
        weight = tl.maximum(weight, tl.where(own == bits, weights, 0))
    return tl.sum(total, axis=0), tl.max(weight, axis=0)


@triton.jit
def _ties(wanted, before, weight):
    """Return how many logits of this weight raise the sum from `before` to `wanted`."""
    # Only NaN logits have weight 0 here.
    weight = tl.maximum(weight, 1)
    return (wanted - before + weight - 1) // weight


@triton.jit
def _above(kept, values, apart, count, floor, one, BLOCK: tl.constexpr):
    """Return `kept` without the weight of logits that weigh less than the floor."""
    total = tl.zeros([BLOCK], dtype=tl.int64)
    if floor > 0.0:
        for start in range(0, count, BLOCK):
            _, weights = _read(values, apart, start, count, one, BLOCK)
            total += tl.where(weights >= floor.to(tl.int64), weights, 0)
        # Logits at or above the floor come first in the order, so the smaller sum is kept.
        kept = tl.minimum(kept, tl.sum(total, axis=0))
    return kept


@triton.jit
def _tie(values, apart, count, bits, number, one, BLOCK: tl.constexpr):
    """Return the place of the `number`-th logit, from 1, with these bits; 0 if there is none."""
    found = tl.full((), 0, tl.int32)
    passed = tl.full((), 0, tl.int64)
    for start in range(0, count, BLOCK):
        own, _ = _read(values, apart, start, count, one, BLOCK)
        same = (own == bits).to(tl.int32)
        hit = (same == 1) & (tl.cumsum(same, axis=0) + passed == number)
        found += tl.sum(tl.where(hit, start + tl.arange(0, BLOCK), 0), axis=0)
        passed += tl.sum(same, axis=0)
    return found
