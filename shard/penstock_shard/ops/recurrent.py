"""Layers with a state in plain torch, token by token; `kernels/recurrent.h` defines them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from penstock_shard.attention.base import AttentionBatch


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    batch: AttentionBatch,
    *,
    silu: bool,
) -> Tensor:
    """Compute `Ops.short_conv`."""
    out, taps = torch.empty_like(x), len(weight)
    for tokens, slot, begins in _sequences(batch):
        if begins:
            state[slot] = 0.0
        inputs = torch.cat((state[slot], x[tokens].float()))
        state[slot] = inputs[len(inputs) - taps + 1 :]
        windows = inputs.unfold(0, taps, 1).transpose(1, 2)
        summed = (windows * weight).sum(dim=1)
        summed = summed if bias is None else summed + bias
        out[tokens] = (functional.silu(summed) if silu else summed).to(x.dtype)
    return out


def delta_rule(
    qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: AttentionBatch
) -> Tensor:
    """Compute `Ops.delta_rule`."""
    _, heads, dim, dim_v = state.shape
    keys = (qkv.shape[1] - heads * dim_v) // 2
    query, key, value = torch.split(qkv.float(), [keys, keys, heads * dim_v], dim=-1)
    query, key = (
        _to_unit(part.view(len(qkv), -1, dim)).repeat_interleave(heads * dim // keys, dim=1)
        for part in (query, key)
    )
    query, value = query * dim**-0.5, value.view(len(qkv), heads, dim_v)
    decay = decay.unsqueeze(-1) if decay.dim() == 2 else decay
    out = torch.empty_like(value)
    for tokens, slot, begins in _sequences(batch):
        if begins:
            state[slot] = 0.0
        for token in range(tokens.start, tokens.stop):
            matrix = state[slot] * decay[token].unsqueeze(-1)
            found = (matrix * key[token].unsqueeze(-1)).sum(dim=1)
            change = (value[token] - found) * beta[token].unsqueeze(-1)
            matrix = matrix + key[token].unsqueeze(-1) * change.unsqueeze(1)
            out[token] = (matrix * query[token].unsqueeze(-1)).sum(dim=1)
            state[slot] = matrix
    return out.to(qkv.dtype)


def decay(x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """Compute `Ops.decay`."""
    rate = rate if x.dim() == 2 else rate.unsqueeze(-1)
    return (-rate * functional.softplus(x.float() + bias)).exp()


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    """Compute `Ops.selective_scan`."""
    heads = x.shape[1]
    wide = x.float()
    b, c = (each.float().repeat_interleave(heads // b.shape[1], dim=1) for each in (b, c))
    rates = a.view(heads, 1, -1)
    out = torch.empty_like(wide)
    for tokens, slot, begins in _sequences(batch):
        if begins:
            state[slot] = 0.0
        for token in range(tokens.start, tokens.stop):
            time = dt[token].view(heads, 1, 1)
            inputs = time * wide[token].unsqueeze(-1) * b[token].unsqueeze(1)
            matrix = (time * rates).exp() * state[slot] + inputs
            out[token] = (matrix * c[token].unsqueeze(1)).sum(dim=-1)
            state[slot] = matrix
    out = out if d is None else out + d.unsqueeze(-1) * wide
    return out.to(x.dtype)


def softplus(x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
    """Compute `Ops.softplus`."""
    return functional.softplus(x.float() + bias).clamp(low, high)


def _to_unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def _sequences(batch: AttentionBatch) -> Iterator[tuple[slice, Tensor, bool]]:
    """Yield each sequence's tokens, the index of its state, and True if it begins in this step."""
    start = 0
    for row, (count, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        yield slice(start, start + count), batch.block_table[row, 0], count == length
        start += count
