"""The attention of a layer, up to its output matrix: with keys and values of each head, or with
latents.

Both are called alike. Written on the ops interface.
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
from penstock_shard.models.decoder_spec import LatentSpec
from penstock_shard.models.latent_heads import LatentHeads
from penstock_shard.models.linear import Linear
from penstock_shard.ops.base import HeadNorm, Ops, Rope


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Memory for intermediate results, [T, ...], which ops may use or not."""

    qkv: Tensor | None
    query: Tensor | None


class Attention(Protocol):
    """Normed hidden states [T, H] -> what their tokens attend to, [T, Hq * Dv]; their keys and
    values are written to the layer's cache.
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
        """The same with each of its linear layers changed."""


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Heads with queries, and with keys and values that groups of them share."""

    ops: Ops
    spec: LayerSpec
    rope: Rope
    qkv: Linear
    norm: HeadNorm | None
    # Where pairs that are rotated lie side by side: the columns of qkv in the order that the ops
    # rotate them in. Scores are sums over a head, so they are the same in any order.
    order: Tensor | None = None

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
        qkv = self.qkv(hidden, scratch.qkv, adapters)
        query = self.ops.rope_and_cache(
            qkv if self.order is None else qkv[:, self.order],
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
            cache, query, batch, scale=spec.scale, window=spec.window, softcap=spec.softcap
        )
        return attended.view(len(hidden), -1)

    def make_scratch(self, num_tokens: int) -> AttentionScratch:
        make, spec = self.ops.scratch, self.spec
        return AttentionScratch(
            qkv=make(num_tokens, self.qkv.matrix.out_features),
            query=make(num_tokens, spec.num_heads, spec.head_dim),
        )

    def change(self, change: Callable[[Linear], Linear]) -> HeadAttention:
        return dataclasses.replace(self, qkv=change(self.qkv))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Heads whose keys and values are products of one latent; see `models/latent_heads.py`."""

    ops: Ops
    spec: LayerSpec
    latent: LatentSpec
    rope: Rope
    interleaved: bool
    # Hidden states -> latents: that of queries, if they have one, that of keys and values, and the
    # part of keys that is rotated.
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
        cos, sin = (part[positions].unsqueeze(1) for part in (self.rope.cos, self.rope.sin))
        plain, turned = query[..., : self.latent.plain], query[..., self.latent.plain :]
        query = torch.cat((plain, self._rotate(turned, cos, sin)), dim=-1)
        if self.rope.temperature is not None:
            query.mul_(self.rope.temperature[positions].view(-1, 1, 1))
        latent = self._norm(latent, self.latent_norm).unsqueeze(1)
        key = torch.cat((latent, self._rotate(shared.unsqueeze(1), cos, sin)), dim=-1)
        backend = self.ops.backend
        backend.write(cache, key, latent, batch.slots)
        query = self.heads.absorb(query)
        attended = backend.attend(cache, query, batch, scale=self.spec.scale)
        return self.heads.expand(attended).flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.add_rms_norm(x.contiguous(), None, weight, self.latent.norm_eps, 0.0)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, H, P] rotated; cos, sin [T, 1, P / 2]. One operation an element at a time: a fused
        one rounds once less, and torch does not always use it.
        """
        if self.interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = x.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned, dim=-1).to(x.dtype)

    def make_scratch(self, num_tokens: int) -> AttentionScratch:
        return AttentionScratch(None, None)

    def change(self, change: Callable[[Linear], Linear]) -> LatentAttention:
        return dataclasses.replace(self, down=change(self.down), query=change(self.query))
