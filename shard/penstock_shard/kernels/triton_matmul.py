"""Matrix products in Triton with fixed tiles: a row's bits do not depend on other rows.

Not yet run on hardware; see `triton_attention.py`.

A sum runs over K from its start, without split-K, in float32. A tile has 64 rows, or 128 in a
product of more than 64 rows. Both sizes give the same bits, because the same instructions (each
over 64 rows on Hopper, over 16 on earlier cards) run in the same order. Exact products of experts
also have these bits. The other sizes of a tile depend only on the weight, and the number of stages
also on the device. Nothing is tuned at run time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from penstock_shard.kernels.triton_device import shared_bytes

# Tiles of rows computed at about the same time, to share weights in the L2 cache.
_ROWS_TOGETHER = tl.constexpr(8)
# Programs that keep a large GPU busy.
_ENOUGH_PROGRAMS = 128
# The number of experts assumed active in a small step. In many models, a token has 8 experts.
_BUSY_EXPERTS = 8


@triton.jit
def _tile_product(
    x_ptr,
    weight_ptr,
    rows,
    in_rows,
    columns,
    in_columns,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply rows of x [., K] by transposed rows of weight [., K]: float32 [BLOCK_M, BLOCK_N]."""
    index = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * K + index[None, :]
    weight_ptrs = weight_ptr + columns.to(tl.int64)[:, None] * K + index[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs, mask=in_rows[:, None], other=0.0)
            weight = tl.load(weight_ptrs, mask=in_columns[:, None], other=0.0)
        else:
            left = (index < K - start)[None, :]
            x = tl.load(x_ptrs, mask=in_rows[:, None] & left, other=0.0)
            weight = tl.load(weight_ptrs, mask=in_columns[:, None] & left, other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    return sums


@triton.jit(do_not_specialize=("num_rows",))
def _linear_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    BIAS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    column_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    together: tl.constexpr = _ROWS_TOGETHER * column_tiles
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    first = program // together * _ROWS_TOGETHER
    count = tl.minimum(row_tiles - first, _ROWS_TOGETHER)
    rows = (first + program % together % count) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = program % together // count * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < num_rows
    in_columns = columns < N
    sums = _tile_product(
        x_ptr, weight_ptr, rows, in_rows, columns, in_columns, K, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if BIAS:
        sums += tl.load(bias_ptr + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :],
        sums.to(out_ptr.dtype.element_ty),
        mask=in_rows[:, None] & in_columns[None, :],
    )


@triton.jit
def _grouped_kernel(
    out_ptr,
    x_ptr,
    weights_ptr,
    offsets_ptr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    column_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // column_tiles
    # Tiles of expert e begin at offsets[e] // BLOCK_M + e. They do not overlap, and some have no
    # rows.
    index = tl.arange(0, PADDED_EXPERTS)
    begins = tl.load(offsets_ptr + index, mask=index < EXPERTS, other=0) // BLOCK_M + index
    expert = tl.sum(((begins <= tile) & (index < EXPERTS)).to(tl.int32), 0) - 1
    begin = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    first = begin + (tile - begin // BLOCK_M - expert) * BLOCK_M
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < end
    in_columns = columns < N
    sums = _tile_product(
        x_ptr,
        weights_ptr + expert.to(tl.int64) * (N * K),
        rows,
        in_rows,
        columns,
        in_columns,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :],
        sums.to(out_ptr.dtype.element_ty),
        mask=in_rows[:, None] & in_columns[None, :],
    )


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


@functools.cache
def tiling(num_columns: int, depth: int, itemsize: int, shared: int, *, rows: int) -> Tiling:
    """Return the tiling for `rows` (16, 64 or 128) of a product with a weight [num_columns, depth].

    Wide tiles read x less often, so tiles are as wide as possible while each multiprocessor has a
    program. As many stages as fit into `shared` bytes keep weights coming from memory; their number
    does not change bits.
    """
    num_warps = 4 if rows <= 64 else 8
    if itemsize == 4:
        return Tiling(rows, 32, 32, num_warps, 2)
    columns = 128
    while columns > 32 and num_columns < columns * _ENOUGH_PROGRAMS:
        columns //= 2
    narrow = rows == 16 or columns == 32
    step = 128 if narrow and depth % 128 == 0 else 64
    # Shares of a multiprocessor's 227 kB of shared memory. With few columns, one program runs on
    # it, otherwise two.
    room = min(shared, 176 << 10 if columns == 32 else 112 << 10)
    return Tiling(rows, columns, step, num_warps, min(8, room // ((rows + columns) * step * 2)))


def fixed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return x [T, K] @ weight [N, K].T + bias [N], [T, N]. A result row's bits depend only on its
    row of x.
    """
    x = x.contiguous()
    num_rows, (num_columns, depth) = len(x), weight.shape
    out = x.new_empty(num_rows, num_columns) if out is None else out
    if num_rows:
        rows = 64 if num_rows <= 64 else 128
        shared = shared_bytes(x.device)
        shape = tiling(num_columns, depth, x.element_size(), shared, rows=rows)
        grid = triton.cdiv(num_rows, shape.rows) * triton.cdiv(num_columns, shape.columns)
        _linear_kernel[(grid,)](
            out,
            x,
            weight,
            x if bias is None else bias,
            num_rows,
            BIAS=bias is not None,
            N=num_columns,
            K=depth,
            BLOCK_M=shape.rows,
            BLOCK_N=shape.columns,
            BLOCK_K=shape.depth,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    return out


def grouped_linear(x: Tensor, weights: Tensor, offsets: Tensor, *, exact: bool = False) -> Tensor:
    """Multiply each row of x [T, K], sorted by expert, by its expert's weight of [E, N, K] -> [T,
    N].

    offsets int32 [E + 1], on the device: each expert's first row, and T. The launch depends only on
    T and E, so it can be captured. If `exact`, a row's bits depend only on that row.
    """
    x = x.contiguous()
    num_rows, (experts, num_columns, depth) = len(x), weights.shape
    out = x.new_empty(num_rows, num_columns)
    if num_rows:
        few = num_rows <= 16 * experts and not exact
        # Columns, over all experts, that a small step computes.
        columns = num_columns * min(experts, _BUSY_EXPERTS)
        shared = shared_bytes(x.device)
        shape = tiling(columns, depth, x.element_size(), shared, rows=16 if few else 64)
        tiles = num_rows // shape.rows + experts
        _grouped_kernel[(tiles * triton.cdiv(num_columns, shape.columns),)](
            out,
            x,
            weights,
            offsets,
            EXPERTS=experts,
            PADDED_EXPERTS=triton.next_power_of_2(experts),
            N=num_columns,
            K=depth,
            BLOCK_M=shape.rows,
            BLOCK_N=shape.columns,
            BLOCK_K=shape.depth,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    return out
