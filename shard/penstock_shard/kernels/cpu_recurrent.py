"""Binding of the CPU kernels in recurrent.h, for layers with a state; see `kernels/cpu.py`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.kernels.c_calls import check, declare, plain, pointer, say

# The largest number of inputs of a short convolution.
MOST_TAPS = 16


@dataclass(frozen=True, slots=True)
class Steps:
    """A step's tokens by sequence, for layers with a state: cu_queries int32 [B + 1], seq_lens
    int32 [B], and block_table int32 [B, M], whose first column has the states' slots.
    """

    cu_queries: Tensor
    seq_lens: Tensor
    block_table: Tensor

    @property
    def arguments(self) -> tuple[int, ...]:
        return (
            self.cu_queries.data_ptr(),
            self.seq_lens.data_ptr(),
            self.block_table.data_ptr(),
            len(self.seq_lens),
            self.block_table.stride(0),
        )


class RecurrentKernels:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._short_conv = declare(library, "short_conv", "piippiipipppiip", ctypes.c_int64)
        self._delta_rule = declare(library, "delta_rule", "piiiiipippipppiip", ctypes.c_int64)
        self._decay = declare(library, "decay", "piiippp", None)
        arguments = "piiiiippipppp" + "ipppii" + "p"
        self._selective_scan = declare(library, "selective_scan", arguments, ctypes.c_int64)
        self._softplus = declare(library, "softplus", "piipffp", None)

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        step: Steps,
        *,
        silu: bool,
    ) -> Tensor:
        """Convolve the last K inputs of each channel of x [T, C], with SiLU if `silu`; return [T,
        C].

        weight [K, C], bias [C]. state [slots, K - 1, C] has the earlier inputs, and is updated.
        """
        rows, channels = x.shape
        out = torch.empty_like(x)
        shape = (len(state), len(weight) - 1, channels)
        if not (plain(x) and plain(weight) and plain(state)) or state.shape != shape:
            raise ValueError(f"short_conv: x {say(x)}, state {say(state)}, {len(weight)} taps")
        if len(weight) > MOST_TAPS:
            raise ValueError(f"a short convolution of {len(weight)} taps; at most {MOST_TAPS}")
        if weight.shape[1] != channels:
            raise ValueError(f"short_conv: x {say(x)}, weight {say(weight)}")
        status = self._short_conv(
            x.data_ptr(),
            rows,
            channels,
            weight.data_ptr(),
            pointer(bias),
            len(weight),
            int(silu),
            state.data_ptr(),
            len(state),
            *step.arguments,
            out.data_ptr(),
        )
        check(status)
        return out

    def delta_rule(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, step: Steps
    ) -> Tensor:
        """Return the delta rule's outputs [T, H, Dv] for qkv [T, 2 Hk D + H Dv]; see recurrent.h.

        decay [T, H], or [T, H, D] for each channel; beta [T, H]; state [slots, H, D, Dv] is
        updated.
        """
        rows, width = qkv.shape
        slots, heads, dim, dim_v = state.shape
        key_heads = (width - heads * dim_v) // (2 * dim)
        out = torch.empty(rows, heads, dim_v)
        by_channel = decay.dim() == 3
        if (
            not all(map(plain, (qkv, decay, beta, state)))
            or width != 2 * key_heads * dim + heads * dim_v
            or heads % key_heads
            or decay.shape != ((rows, heads, dim) if by_channel else (rows, heads))
            or beta.shape != (rows, heads)
        ):
            raise ValueError(
                f"delta_rule: qkv {say(qkv)}, decay {say(decay)}, beta {say(beta)}, "
                f"state {say(state)}"
            )
        status = self._delta_rule(
            qkv.data_ptr(),
            rows,
            heads,
            key_heads,
            dim,
            dim_v,
            decay.data_ptr(),
            int(by_channel),
            beta.data_ptr(),
            state.data_ptr(),
            slots,
            *step.arguments,
            out.data_ptr(),
        )
        check(status)
        return out

    def decay(self, x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        """Return exp(-rate * softplus(x + bias)) of x [T, H] or [T, H, D]; rate [H], bias of x's
        shape without T.
        """
        out, heads = torch.empty_like(x), x.shape[1]
        if not all(map(plain, (x, rate, bias))) or bias.shape != x.shape[1:] or len(rate) != heads:
            raise ValueError(f"decay: x {say(x)}, rate {say(rate)}, bias {say(bias)}")
        dim = x.shape[2] if x.dim() == 3 else 1
        self._decay(
            x.data_ptr(), len(x), heads, dim, rate.data_ptr(), bias.data_ptr(), out.data_ptr()
        )
        return out

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor,
        step: Steps,
    ) -> Tensor:
        """Scan x [T, H, D] -> [T, H, D]; see recurrent.h.

        dt [T, H]; a [H] or [H, N]; b and c [T, G, N]; d [H]; state [slots, H, D, N] is updated.
        """
        rows, heads, dim = x.shape
        groups, width = b.shape[1:]
        by_column = a.dim() == 2
        out = torch.empty_like(x)
        given = (x, dt, a, b, c, state) if d is None else (x, dt, a, b, c, state, d)
        if (
            not all(map(plain, given))
            or dt.shape != (rows, heads)
            or a.shape != ((heads, width) if by_column else (heads,))
            or b.shape != c.shape
            or len(b) != rows
            or heads % groups
            or state.shape[1:] != (heads, dim, width)
            or (d is not None and len(d) != heads)
        ):
            raise ValueError(f"selective_scan: {', '.join(map(say, given))}")
        status = self._selective_scan(
            x.data_ptr(),
            rows,
            heads,
            groups,
            dim,
            width,
            dt.data_ptr(),
            a.data_ptr(),
            int(by_column),
            b.data_ptr(),
            c.data_ptr(),
            pointer(d),
            state.data_ptr(),
            len(state),
            *step.arguments,
            out.data_ptr(),
        )
        check(status)
        return out

    def softplus(self, x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
        """Return softplus(x + bias), clamped to [low, high], [T, H]; bias [H]."""
        out = torch.empty_like(x)
        if not (plain(x) and plain(bias)) or bias.shape != x.shape[1:]:
            raise ValueError(f"softplus: x {say(x)}, bias {say(bias)}")
        self._softplus(x.data_ptr(), len(x), x.shape[1], bias.data_ptr(), low, high, out.data_ptr())
        return out
