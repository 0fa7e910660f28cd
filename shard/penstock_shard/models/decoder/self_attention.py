"""A layer's attention, up to its output matrix: with keys and values for each head, or with
latents. Written on the ops interface.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, LayerCache, LayerSpec
from penstock_shard.lora.lora import TokenAdapters
from penstock_shard.models.decoder.linear import Linear
from penstock_shard.models.decoder.spec import LatentSpec
from penstock_shard.models.latent_heads import LatentHeads
from penstock_shard.ops.base import HeadNorm, Ops, Rope


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Memory for intermediate results, [T, ...], which ops may use."""

    qkv: Tensor | None
    query: Tensor | None


NO_ATTENTION_SCRATCH = AttentionScratch(None, None)


class Attention(Protocol):
    """Normed hidden states [T, H] -> attention output [T, Hq * Dv]. Writes the tokens' keys and
    values to the cache. Positions are int64 [T], or [T, rotary_dim / 2] if each frequency has its
    own.
    """

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        scratch: AttentionScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor: ...

    def make_scratch(self, num_tokens: int) -> AttentionScratch: ...

    def change(self, change: Callable[[Linear], Linear]) -> Attention:
        """Return a copy with each linear layer replaced by `change`."""


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Attention in which groups of query heads share a key head and a value head."""

    ops: Ops
    spec: LayerSpec
    rope: Rope
    qkv: Linear
    norm: HeadNorm | None
    # The order of qkv's columns that the ops' rotation needs, if the checkpoint interleaves pairs.
    # A score is a sum over a head's elements, so any order gives the same scores.
    order: Tensor | None = None
    # The columns of qkv that gate the output, which `order` leaves out; None without gates.
    gate: Tensor | None = None
    # Ones, float32 [Dv], if values are normed.
    value_norm: Tensor | None = None
    norm_eps: float = 0.0
    # Scores of attention sinks (an extra key with value 0), float32 [Hq].
    sinks: Tensor | None = None

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        scratch: AttentionScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        spec, rope = self.spec, self.rope
        if positions.dim() > 1:
            rope = rope.of(positions)
            positions = torch.arange(len(positions), device=positions.device)
        qkv = self.qkv(hidden, scratch.qkv, adapters)
        if self.value_norm is not None:
            self._norm_values(qkv, self.value_norm)
        heads = qkv if self.order is None else qkv[:, self.order]
        query = self.ops.rope_and_cache(
            heads,
            spec,
            cache,
            positions,
            batch.slots,
            rope,
            self.norm,
            scratch.query,
        )
        if rope.temperature is not None:
            query.mul_(rope.temperature[positions].view(-1, 1, 1))
        attended = self.ops.backend.attend(
            cache,
            query,
            batch,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self.sinks,
        )
        attended = attended.view(len(hidden), -1)
        if self.gate is None:
            return attended
        gated = torch.cat((qkv[:, self.gate], attended), dim=-1)
        return self.ops.gated_activation(gated, "sigmoid")

    def _norm_values(self, qkv: Tensor, weight: Tensor) -> None:
        values = qkv[:, -self.spec.num_kv_heads * self.spec.head_dim_v :]
        heads = values.reshape(-1, self.spec.head_dim_v).contiguous()
        normed = self.ops.add_rms_norm(heads, None, weight, self.norm_eps, 0.0)
        values.copy_(normed.view(values.shape))

    def make_scratch(self, num_tokens: int) -> AttentionScratch:
        make, spec = self.ops.scratch, self.spec
        return AttentionScratch(
            qkv=make(num_tokens, self.qkv.matrix.out_features),
            query=make(num_tokens, spec.num_heads, spec.head_dim),
        )

    def change(self, change: Callable[[Linear], Linear]) -> HeadAttention:
        return dataclasses.replace(self, qkv=change(self.qkv))


@dataclass(frozen=True, slots=True)
class ReadingAttention:
    """Attention whose queries read another layer's keys and values."""

    ops: Ops
    spec: LayerSpec
    rope: Rope
    query: Linear
    # float32 [D]
    query_norm: Tensor
    norm_eps: float
    norm_offset: float

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        scratch: AttentionScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        spec = self.spec
        heads = self.query(hidden, None, adapters).view(-1, spec.head_dim)
        heads = self.ops.add_rms_norm(heads, None, self.query_norm, self.norm_eps, self.norm_offset)
        query = heads.view(len(hidden), spec.num_heads, spec.head_dim)
        query = _rotate(query, *_angles(self.rope, positions), interleaved=False)
        attended = self.ops.backend.attend(
            cache, query, batch, scale=spec.scale, window=spec.window, softcap=spec.softcap
        )
        return attended.view(len(hidden), -1)

    def make_scratch(self, num_tokens: int) -> AttentionScratch:
        return NO_ATTENTION_SCRATCH

    def change(self, change: Callable[[Linear], Linear]) -> ReadingAttention:
        return dataclasses.replace(self, query=change(self.query))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose heads compute keys and values from one latent; see
    `models/latent_heads.py`.
    """

    ops: Ops
    spec: LayerSpec
    latent: LatentSpec
    rope: Rope
    interleaved: bool
    # Hidden states -> the latent of queries, if they have one, the latent of keys and values, and
    # the rotated part of keys.
    down: Linear
    # The query's latent, or hidden states -> queries of all heads.
    query: Linear
    query_norm: Tensor | None
    latent_norm: Tensor
    heads: LatentHeads

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        scratch: AttentionScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        sizes = [self.latent.query_rank or 0, self.latent.rank, self.latent.rotated]
        source, latent, shared = torch.split(self.down(hidden, None, adapters), sizes, dim=-1)
        source = hidden if self.query_norm is None else self._norm(source, self.query_norm)
        query = self.query(source, None, adapters).view(len(hidden), self.spec.num_heads, -1)
        cos, sin = _angles(self.rope, positions)
        plain, turned = query[..., : self.latent.plain], query[..., self.latent.plain :]
        query = torch.cat((plain, _rotate(turned, cos, sin, interleaved=self.interleaved)), dim=-1)
        if self.rope.temperature is not None:
            query.mul_(self.rope.temperature[positions].view(-1, 1, 1))
        latent = self._norm(latent, self.latent_norm).unsqueeze(1)
        key = torch.cat(
            (latent, _rotate(shared.unsqueeze(1), cos, sin, interleaved=self.interleaved)), dim=-1
        )
        backend = self.ops.backend
        backend.write(cache, key, latent, batch.slots)
        query = self.heads.absorb(query)
        attended = backend.attend(cache, query, batch, scale=self.spec.scale)
        return self.heads.expand(attended).flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.add_rms_norm(x.contiguous(), None, weight, self.latent.norm_eps, 0.0)

    def make_scratch(self, num_tokens: int) -> AttentionScratch:
        return NO_ATTENTION_SCRATCH

    def change(self, change: Callable[[Linear], Linear]) -> LatentAttention:
        return dataclasses.replace(self, down=change(self.down), query=change(self.query))


def _angles(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's cosines and sines, [T, 1, P / 2]."""
    own = rope.of(positions)
    return own.cos.unsqueeze(1), own.sin.unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate x [T, H, P] by cos, sin [T, 1, P / 2]. Operations are separate, because a fused one
    rounds once less and torch does not always fuse.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)
