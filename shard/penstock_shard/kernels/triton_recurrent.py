"""Triton kernels of layers with a state: short convolutions, the delta rule, selective scans, as
defined in `kernels/recurrent.h`.

Not yet run on hardware; see `triton_attention.py`. A program keeps a part of one sequence's state
in registers and processes token after token, in float32. So results depend neither on prompt chunks
nor on other sequences.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of channels and tokens that one program of a convolution computes. A prompt's tokens are
# computed in parallel.
_CONV_CHANNELS, _CONV_TOKENS = 256, 32
# Numbers of columns of a head's matrix in a program of the delta rule, and of rows in a program of
# the scan.
_DELTA_COLUMNS, _SCAN_ROWS = 32, 16
# Pointers into a step's shared input buffer. Kernels are not specialized on their alignment.
_UNALIGNED = ("table_ptr", "cu_ptr", "lens_ptr")


class Step(NamedTuple):
    """A step's sequences: cumulative numbers of tokens int32 [B + 1], lengths int32 [B], and the
    block table int32 [B, M], whose first column has the states' slots.
    """

    cu_queries: Tensor
    seq_lens: Tensor
    block_table: Tensor
    # The largest number of tokens of a sequence.
    most_tokens: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        table = self.block_table
        return table, table.stride(0), self.cu_queries, self.seq_lens


@triton.jit
def _sequence(table_ptr, table_stride, cu_ptr, lens_ptr):
    """Return the begin and end of the sequence's tokens in the step, its state's slot, and true if
    the sequence begins in this step.
    """
    row = tl.program_id(0)
    start = tl.load(cu_ptr + row).to(tl.int64)
    end = tl.load(cu_ptr + row + 1).to(tl.int64)
    slot = tl.load(table_ptr + row * table_stride).to(tl.int64)
    return start, end, slot, end - start == tl.load(lens_ptr + row)


@triton.jit
def _input_at(
    place, start, begins, x_ptr, state_ptr, channel, inside,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return a channel's input at a place of the step. Inputs from before the step are in the
    state.
    """
    is_here = place >= start
    now = tl.load(x_ptr + place * CHANNELS + channel, mask=inside & is_here, other=0.0)
    kept_ptr = state_ptr + (place - start + TAPS - 1) * CHANNELS + channel
    kept = tl.load(kept_ptr, mask=inside & (is_here == 0) & (begins == 0), other=0.0)
    return tl.where(is_here, now.to(tl.float32), kept)


@triton.jit
def _keep_inputs(
    start, end, begins, x_ptr, state_ptr, channel, inside,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Replace the state by the last inputs, in place: each input moves to an earlier place."""
    for index in tl.static_range(TAPS - 1):
        place = end - (TAPS - 1) + index
        kept = _input_at(place, start, begins, x_ptr, state_ptr, channel, inside, TAPS, CHANNELS)
        tl.store(state_ptr + index * CHANNELS + channel, kept, mask=inside)


@triton.jit(do_not_specialize=("table_stride",), do_not_specialize_on_alignment=_UNALIGNED)
def _conv_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, states_ptr, table_ptr, table_stride, cu_ptr, lens_ptr,
    BIAS: tl.constexpr, SILU: tl.constexpr, KEEP: tl.constexpr, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    start, end, slot, begins = _sequence(table_ptr, table_stride, cu_ptr, lens_ptr)
    state_ptr = states_ptr + slot * (TAPS - 1) * CHANNELS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    first = start + tl.program_id(2) * TOKENS
    for token in range(first, tl.minimum(first + TOKENS, end)):
        total = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            total += tl.load(bias_ptr + channel, mask=inside, other=0.0)
        for tap in tl.static_range(TAPS):
            taken = _input_at(
                token - (TAPS - 1) + tap, start, begins, x_ptr, state_ptr, channel, inside,
                TAPS, CHANNELS,
            )  # fmt: skip
            total += taken * tl.load(weight_ptr + tap * CHANNELS + channel, mask=inside, other=0.0)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out_ptr + token * CHANNELS + channel, total.to(x_ptr.dtype.element_ty), inside)
    if KEEP:
        _keep_inputs(start, end, begins, x_ptr, state_ptr, channel, inside, TAPS, CHANNELS)


@triton.jit(do_not_specialize=("table_stride",), do_not_specialize_on_alignment=_UNALIGNED)
def _keep_kernel(
    x_ptr, states_ptr, table_ptr, table_stride, cu_ptr, lens_ptr,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start, end, slot, begins = _sequence(table_ptr, table_stride, cu_ptr, lens_ptr)
    state_ptr = states_ptr + slot * (TAPS - 1) * CHANNELS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _keep_inputs(
        start, end, begins, x_ptr, state_ptr, channel, channel < CHANNELS, TAPS, CHANNELS
    )  # fmt: skip


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    step: Step,
    *,
    silu: bool,
) -> Tensor:
    """Compute `Ops.short_conv`."""
    x = x.contiguous()
    out, (taps, channels) = torch.empty_like(x), weight.shape
    block = min(_CONV_CHANNELS, triton.next_power_of_2(channels))
    rows, blocks = len(step.seq_lens), triton.cdiv(channels, block)
    tiles = triton.cdiv(step.most_tokens, _CONV_TOKENS)
    _conv_kernel[(rows, blocks, tiles)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        state,
        *step.arguments,
        BIAS=bias is not None,
        SILU=silu,
        KEEP=tiles == 1,
        TAPS=taps,
        CHANNELS=channels,
        BLOCK=block,
        TOKENS=_CONV_TOKENS,
    )
    if tiles > 1:
        # Launched separately, after all programs have read the state.
        _keep_kernel[(rows, blocks)](
            x, state, *step.arguments, TAPS=taps, CHANNELS=channels, BLOCK=block
        )  # fmt: skip
    return out


@triton.jit
def _unit_vector(ptr, index, inside):
    values = tl.load(ptr + index, mask=inside, other=0.0).to(tl.float32)
    return values * tl.rsqrt(tl.sum(values * values, 0) + 1e-6)


@triton.jit(do_not_specialize=("table_stride",), do_not_specialize_on_alignment=_UNALIGNED)
def _delta_kernel(
    out_ptr, qkv_ptr, decay_ptr, beta_ptr, states_ptr, table_ptr, table_stride, cu_ptr, lens_ptr,
    scale, BY_CHANNEL: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start, end, slot, begins = _sequence(table_ptr, table_stride, cu_ptr, lens_ptr)
    head = tl.program_id(1)
    key_head = head * KEY_HEADS // HEADS
    channel = tl.arange(0, PADDED_DIM)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_key, in_value = channel < DIM, column < DIM_V
    inside = in_key[:, None] & in_value[None, :]
    places = states_ptr + (slot * HEADS + head) * DIM * DIM_V
    places = places + channel[:, None] * DIM_V + column[None, :]
    matrix = tl.load(places, mask=inside & (begins == 0), other=0.0)
    for token in range(start, end):
        query_ptr = qkv_ptr + token * (2 * KEY_HEADS * DIM + HEADS * DIM_V)
        key_ptr = query_ptr + KEY_HEADS * DIM
        value_ptr = key_ptr + KEY_HEADS * DIM + head * DIM_V
        query = _unit_vector(query_ptr + key_head * DIM, channel, in_key) * scale
        key = _unit_vector(key_ptr + key_head * DIM, channel, in_key)
        value = tl.load(value_ptr + column, mask=in_value, other=0.0).to(tl.float32)
        spot = token * HEADS + head
        if BY_CHANNEL:
            kept = tl.load(decay_ptr + spot * DIM + channel, mask=in_key, other=0.0)
            matrix = matrix * kept[:, None]
        else:
            matrix = matrix * tl.load(decay_ptr + spot)
        found = tl.sum(matrix * key[:, None], 0)
        change = (value - found) * tl.load(beta_ptr + spot)
        matrix += key[:, None] * change[None, :]
        read = tl.sum(matrix * query[:, None], 0)
        tl.store(out_ptr + spot * DIM_V + column, read.to(out_ptr.dtype.element_ty), in_value)
    tl.store(places, matrix, mask=inside)


def delta_rule(qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, step: Step) -> Tensor:
    """Compute `Ops.delta_rule`."""
    qkv = qkv.contiguous()
    _, heads, dim, dim_v = state.shape
    out = qkv.new_empty(len(qkv), heads, dim_v)
    block = min(_DELTA_COLUMNS, triton.next_power_of_2(dim_v))
    _delta_kernel[(len(step.seq_lens), heads, triton.cdiv(dim_v, block))](
        out,
        qkv,
        decay.contiguous(),
        beta.contiguous(),
        state,
        *step.arguments,
        dim**-0.5,
        BY_CHANNEL=decay.dim() == 3,
        HEADS=heads,
        KEY_HEADS=(qkv.shape[1] - heads * dim_v) // (2 * dim),
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        DIM_V=dim_v,
        BLOCK=block,
    )
    return out


@triton.jit(do_not_specialize=("table_stride",), do_not_specialize_on_alignment=_UNALIGNED)
def _scan_kernel(
    out_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, states_ptr, table_ptr, table_stride, cu_ptr,
    lens_ptr, BY_COLUMN: tl.constexpr, ADDS: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):  # fmt: skip
    start, end, slot, begins = _sequence(table_ptr, table_stride, cu_ptr, lens_ptr)
    head = tl.program_id(1)
    group = head * GROUPS // HEADS
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED_WIDTH)
    in_head, in_width = channel < DIM, column < WIDTH
    inside = in_head[:, None] & in_width[None, :]
    places = states_ptr + (slot * HEADS + head) * DIM * WIDTH
    places = places + channel[:, None] * WIDTH + column[None, :]
    matrix = tl.load(places, mask=inside & (begins == 0), other=0.0)
    if BY_COLUMN:
        rate = tl.load(a_ptr + head * WIDTH + column, mask=in_width, other=0.0)
    else:
        rate = tl.load(a_ptr + head) + tl.zeros([PADDED_WIDTH], tl.float32)
    for token in range(start, end):
        spot, shared = token * HEADS + head, (token * GROUPS + group) * WIDTH
        time = tl.load(dt_ptr + spot)
        taken = tl.load(x_ptr + spot * DIM + channel, mask=in_head, other=0.0).to(tl.float32)
        into = tl.load(b_ptr + shared + column, mask=in_width, other=0.0).to(tl.float32)
        reads = tl.load(c_ptr + shared + column, mask=in_width, other=0.0).to(tl.float32)
        added = (time * taken)[:, None] * into[None, :]
        matrix = tl.exp(time * rate)[None, :] * matrix + added
        read = tl.sum(matrix * reads[None, :], 1)
        if ADDS:
            read += tl.load(d_ptr + head) * taken
        tl.store(out_ptr + spot * DIM + channel, read.to(out_ptr.dtype.element_ty), in_head)
    tl.store(places, matrix, mask=inside)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    step: Step,
) -> Tensor:
    """Compute `Ops.selective_scan`."""
    x, b, c = x.contiguous(), b.contiguous(), c.contiguous()
    out = torch.empty_like(x)
    _, heads, dim, width = state.shape
    block = min(_SCAN_ROWS, triton.next_power_of_2(dim))
    _scan_kernel[(len(step.seq_lens), heads, triton.cdiv(dim, block))](
        out,
        x,
        dt.contiguous(),
        a,
        b,
        c,
        a if d is None else d,
        state,
        *step.arguments,
        BY_COLUMN=a.dim() == 2,
        ADDS=d is not None,
        HEADS=heads,
        GROUPS=b.shape[1],
        DIM=dim,
        BLOCK=block,
        WIDTH=width,
        PADDED_WIDTH=triton.next_power_of_2(width),
    )
    return out
