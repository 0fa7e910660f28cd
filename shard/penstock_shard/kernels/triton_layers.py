"""Triton kernels of a layer besides products and attention: norms, activation, rotation, cache
writes, sums of experts.

Not yet run on hardware; see `triton_attention.py`. Each row is computed separately, in float32,
with a fixed order of sums.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock_shard.kernels.triton_quantize import Fp8Rows, fp8_scale, in_fp8

# The largest float8_e4m3fn. Larger values are clamped.
_LARGEST_FP8 = tl.constexpr(448.0)
# Values of an activation's row that one program computes.
_ACTIVE_BLOCK = 1024
# Values in a piece, if a program computes a whole row in pieces to round it to fp8.
_ROUNDED_BLOCK = 8192
# Pointers into a step's shared input buffer. Kernels are not specialized on their alignment.
_UNALIGNED = ("slots_ptr",)


@triton.jit
def _cached(values, CUT: tl.constexpr):
    """Clamp values to an 8-bit cache's range if CUT. NaN stays NaN."""
    if not CUT:
        return values
    cut = tl.where(values > _LARGEST_FP8, _LARGEST_FP8, values)
    return tl.where(cut < -_LARGEST_FP8, -_LARGEST_FP8, cut)


@triton.jit
def _norm_kernel(
    out_ptr,
    rounded_ptr,
    scales_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    offset,
    RESIDUAL: tl.constexpr,
    ROUND: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    index = tl.arange(0, PADDED)
    inside = index < SIZE
    values = tl.load(x_ptr + row + index, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        stream = tl.load(residual_ptr + row + index, mask=inside, other=0.0).to(tl.float32)
        added = (values + stream).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row + index, added, mask=inside)
        # Norm the residual stream as it was rounded for the next layer.
        values = added.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + index, mask=inside, other=0.0).to(tl.float32) + offset
    normed = values * factor * weight
    tl.store(out_ptr + row + index, normed.to(out_ptr.dtype.element_ty), mask=inside)
    if ROUND:
        # The norm must have the same bits with and without rounding. So in both cases, each thread
        # holds the same number of adjacent values. The values to round are read again, because the
        # compiler would otherwise fuse other operations.
        width: tl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
        index = tl.max_contiguous(index, width)
        tl.debug_barrier()
        kept = tl.load(out_ptr + row + index, mask=inside, other=0.0).to(tl.float32)
        scale = fp8_scale(tl.abs(kept))
        tl.store(scales_ptr + tl.program_id(0), scale)
        tl.store(rounded_ptr + row + index, in_fp8(kept, scale), mask=inside)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    out: Tensor | None = None,
    *,
    rounded: Fp8Rows | None = None,
) -> Tensor:
    """Compute `Ops.add_rms_norm`. `rounded` is memory for the result in fp8."""
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    rows, size = x.shape
    if residual is not None:
        assert residual.is_contiguous(), "the stream must be contiguous: it is added to in place"
    if rows:
        padded = triton.next_power_of_2(size)
        _norm_kernel[(rows,)](
            out,
            *((out, out) if rounded is None else rounded),
            x,
            x if residual is None else residual,
            weight,
            eps,
            offset,
            RESIDUAL=residual is not None,
            ROUND=rounded is not None,
            SIZE=size,
            PADDED=padded,
            num_warps=min(16, max(1, padded // 512)),
        )
    return out


@triton.jit
def _active(gate_ptr, up_ptr, inside, GELU: tl.constexpr):
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr, mask=inside, other=0.0)
    inner = gate
    if GELU:
        # x / 2 * (1 + tanh(y)) is x times the logistic function of 2 y.
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + tl.exp(-inner)) * up.to(tl.float32)
    return active.to(gate_ptr.dtype.element_ty)


@triton.jit
def _gated_kernel(
    out_ptr, gate_up_ptr, GELU: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < SIZE
    gate_ptr = gate_up_ptr + row * (2 * SIZE) + index
    tl.store(
        out_ptr + row * SIZE + index, _active(gate_ptr, gate_ptr + SIZE, inside, GELU), mask=inside
    )


@triton.jit
def _gated_round_kernel(
    out_ptr,
    rounded_ptr,
    scales_ptr,
    gate_up_ptr,
    GELU: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a whole row, because its scale must be known before any value is rounded."""
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * SIZE
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, SIZE, BLOCK):
        index = start + tl.arange(0, BLOCK)
        gate_ptr = gate_up_ptr + row * (2 * SIZE) + index
        active = _active(gate_ptr, gate_ptr + SIZE, index < SIZE, GELU)
        tl.store(out_ptr + index, active, mask=index < SIZE)
        magnitude = tl.abs(active.to(tl.float32))
        largest = tl.maximum(largest, magnitude, propagate_nan=tl.PropagateNan.ALL)
    scale = fp8_scale(largest)
    tl.store(scales_ptr + row, scale)
    # Threads read values that others have written.
    tl.debug_barrier()
    for start in range(0, SIZE, BLOCK):
        index = start + tl.arange(0, BLOCK)
        active = tl.load(out_ptr + index, mask=index < SIZE, other=0.0)
        values = in_fp8(active.to(tl.float32), scale)
        tl.store(rounded_ptr + row * SIZE + index, values, mask=index < SIZE)


def gated_activation(
    gate_up: Tensor, *, gelu: bool, out: Tensor | None = None, rounded: Fp8Rows | None = None
) -> Tensor:
    """Compute `Ops.gated_activation`. `rounded` is memory for the result in fp8."""
    gate_up = gate_up.contiguous()
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size) if out is None else out
    largest = _ACTIVE_BLOCK if rounded is None else _ROUNDED_BLOCK
    block = min(largest, triton.next_power_of_2(size))
    if rows and rounded is not None:
        _gated_round_kernel[(rows,)](
            out,
            *rounded,
            gate_up,
            GELU=gelu,
            SIZE=size,
            BLOCK=block,
            num_warps=max(1, block // 512),
        )
    elif rows:
        _gated_kernel[(rows, triton.cdiv(size, block))](
            out, gate_up, GELU=gelu, SIZE=size, BLOCK=block, num_warps=max(1, block // 256)
        )
    return out


@triton.jit
def _rotate_heads(
    out_ptr,
    out_mask,
    heads_ptr,
    weight_ptr,
    cos,
    sin,
    eps,
    offset,
    NORM: tl.constexpr,
    CUT: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
):
    """Norm and rotate COUNT consecutive heads, from heads_ptr to out_ptr."""
    head = tl.arange(0, PADDED_COUNT)[:, None]
    half = tl.arange(0, PADDED_HALF)
    inside = (head < COUNT) & (half < HALF)[None, :]
    places = head * DIM + half[None, :]
    first = tl.load(heads_ptr + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + places + HALF, mask=inside, other=0.0).to(tl.float32)
    rest = 2 * HALF + tl.arange(0, PADDED_REST)
    in_rest = (head < COUNT) & (rest < DIM)[None, :]
    rest_places = head * DIM + rest[None, :]
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if 2 * HALF < DIM:
        others = tl.load(heads_ptr + rest_places, mask=in_rest, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(others * others, 1)
    if NORM:
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        weights = tl.load(weight_ptr + half, mask=half < HALF, other=0.0) + offset
        first = first * factor * weights[None, :]
        weights = tl.load(weight_ptr + HALF + half, mask=half < HALF, other=0.0) + offset
        second = second * factor * weights[None, :]
        if 2 * HALF < DIM:
            weights = tl.load(weight_ptr + rest, mask=rest < DIM, other=0.0) + offset
            others = others * factor * weights[None, :]
    to = out_ptr.dtype.element_ty
    rotated = _cached(first * cos[None, :] - second * sin[None, :], CUT)
    tl.store(out_ptr + places, rotated.to(to), mask=inside & out_mask)
    rotated = _cached(second * cos[None, :] + first * sin[None, :], CUT)
    tl.store(out_ptr + places + HALF, rotated.to(to), mask=inside & out_mask)
    if 2 * HALF < DIM:
        tl.store(out_ptr + rest_places, _cached(others, CUT).to(to), mask=in_rest & out_mask)


@triton.jit(do_not_specialize_on_alignment=(*_UNALIGNED, "positions_ptr"))
def _rope_kernel(
    query_ptr,
    qkv_ptr,
    keys_ptr,
    values_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    query_weight_ptr,
    key_weight_ptr,
    eps,
    offset,
    NORM: tl.constexpr,
    CUT: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
):
    """Rotate one token's key and query heads of one KV head; write key and value to the cache."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    half = tl.arange(0, PADDED_HALF)
    angles = tl.load(positions_ptr + token) * HALF + half
    cos = tl.load(cos_ptr + angles, mask=half < HALF, other=0.0)
    sin = tl.load(sin_ptr + angles, mask=half < HALF, other=0.0)
    slot = tl.load(slots_ptr + token)
    qkv_ptr += token * ((HEADS + 2 * KV_HEADS) * DIM)
    _rotate_heads(
        query_ptr + (token * HEADS + kv_head * group) * DIM,
        True,
        qkv_ptr + kv_head * group * DIM,
        query_weight_ptr,
        cos,
        sin,
        eps,
        offset,
        NORM,
        False,
        group,
        PADDED_GROUP,
        DIM,
        HALF,
        PADDED_HALF,
        PADDED_REST,
    )
    place = (slot * KV_HEADS + kv_head) * DIM
    _rotate_heads(
        keys_ptr + place,
        slot >= 0,
        qkv_ptr + (HEADS + kv_head) * DIM,
        key_weight_ptr,
        cos,
        sin,
        eps,
        offset,
        NORM,
        CUT,
        1,
        1,
        DIM,
        HALF,
        PADDED_HALF,
        PADDED_REST,
    )
    index = tl.arange(0, PADDED)
    value = tl.load(
        qkv_ptr + (HEADS + KV_HEADS + kv_head) * DIM + index, mask=index < DIM, other=0.0
    )
    tl.store(
        values_ptr + place + index,
        _cached(value.to(tl.float32), CUT).to(values_ptr.dtype.element_ty),
        mask=(index < DIM) & (slot >= 0),
    )


def rope_and_cache(
    qkv: Tensor,
    num_heads: int,
    cache: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    rope: tuple[Tensor, Tensor],
    norm: tuple[Tensor, Tensor, float, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `Ops.rope_and_cache`. `rope` has cos and sin; `norm` has the weights for queries and
    for keys, eps and the offset. The cache is a pair from `make_paged_pair`; slots below 0 are
    skipped.
    """
    qkv = qkv.contiguous()
    _, _, kv_heads, dim = cache[0].shape
    half = rope[0].shape[1]
    out = qkv.new_empty(len(qkv), num_heads, dim) if out is None else out
    weights = rope if norm is None else norm[:2]
    if len(qkv):
        _rope_kernel[(len(qkv), kv_heads)](
            out,
            qkv,
            *cache,
            positions,
            slots,
            *rope,
            *weights,
            *((0.0, 0.0) if norm is None else norm[2:]),
            NORM=norm is not None,
            CUT=_is_fp8(cache[0]),
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            PADDED_GROUP=triton.next_power_of_2(num_heads // kv_heads),
            DIM=dim,
            PADDED=triton.next_power_of_2(dim),
            HALF=half,
            PADDED_HALF=triton.next_power_of_2(half),
            PADDED_REST=triton.next_power_of_2(max(1, dim - 2 * half)),
            num_warps=_warps(num_heads // kv_heads * dim),
        )
    return out


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _write_kernel(
    part_ptr, heads_ptr, slots_ptr, SIZE: tl.constexpr, PADDED: tl.constexpr, CUT: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    index = tl.arange(0, PADDED)
    heads = tl.load(heads_ptr + token * SIZE + index, mask=index < SIZE, other=0.0)
    tl.store(
        part_ptr + slot * SIZE + index,
        _cached(heads.to(tl.float32), CUT).to(part_ptr.dtype.element_ty),
        mask=(index < SIZE) & (slot >= 0),
    )


def write_heads(part: Tensor, heads: Tensor, slots: Tensor) -> None:
    """Write heads [T, Hkv, D] to a cache's keys or values at slots int64 [T]. Slots below 0 are
    skipped. Values beyond the range of an 8-bit cache are clamped.
    """
    size = part.shape[2] * part.shape[3]
    if len(heads):
        _write_kernel[(len(heads),)](
            part,
            heads.contiguous(),
            slots,
            SIZE=size,
            PADDED=triton.next_power_of_2(size),
            CUT=_is_fp8(part),
            num_warps=_warps(size),
        )


@triton.jit
def _combine_kernel(
    out_ptr,
    rows_ptr,
    chosen_ptr,
    weights_ptr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        row = tl.load(chosen_ptr + token * COUNT + i)
        weight = tl.load(weights_ptr + token * COUNT + i)
        values = tl.load(rows_ptr + row * SIZE + index, mask=inside, other=0.0)
        total += values.to(tl.float32) * weight
    tl.store(out_ptr + token * SIZE + index, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine_rows(
    rows: Tensor, chosen: Tensor, weights: Tensor, out: Tensor | None = None
) -> Tensor:
    """Combine rows [R, N] by indices `chosen` int64 [T, k] and weights float32 [T, k] -> [T, N];
    see `Ops.combine`.
    """
    tokens, count = chosen.shape
    size = rows.shape[1]
    out = rows.new_empty(tokens, size) if out is None else out
    if tokens:
        block = min(_ACTIVE_BLOCK, triton.next_power_of_2(size))
        _combine_kernel[(tokens, triton.cdiv(size, block))](
            out,
            rows.contiguous(),
            chosen.contiguous(),
            weights.contiguous(),
            COUNT=count,
            SIZE=size,
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
    return out


def _is_fp8(part: Tensor) -> bool:
    return part.dtype is torch.float8_e4m3fn


def _warps(num_values: int) -> int:
    """Return a number of warps, at most 8, with which each thread has about 8 values."""
    return int(min(8, max(1, triton.next_power_of_2(num_values) // 256)))


def is_contiguous_pair(cache: Any) -> bool:
    return (
        isinstance(cache, tuple)
        and len(cache) == 2
        and all(isinstance(part, Tensor) and part.dim() == 4 for part in cache)
        and all(part.is_contiguous() for part in cache)
    )
