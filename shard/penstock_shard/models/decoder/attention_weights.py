"""A layer's tensors -> its attention or recurrence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock_shard.attention.base import LayerSpec, StateSpec
from penstock_shard.models.decoder.gated_delta_net import GatedDeltaNet
from penstock_shard.models.decoder.self_attention import (
    Attention,
    HeadAttention,
    LatentAttention,
    ReadingAttention,
)
from penstock_shard.models.decoder.short_conv import ShortConv
from penstock_shard.models.decoder.spec import (
    NO_ROTATION,
    DecoderSpec,
    DeltaSpec,
    LatentSpec,
    attention_modules,
    delta_modules,
)
from penstock_shard.models.decoder.tensor_reader import TensorReader
from penstock_shard.ops.base import HeadNorm, Rope


class AttentionWeights:
    """Reads layers' attention. `ropes` has a table for each of the spec's rope types."""

    def __init__(self, spec: DecoderSpec, ropes: Mapping[str, Rope], reader: TensorReader) -> None:
        self._spec = spec
        self._ropes = ropes
        self._reader = reader

    def read(self, layer: LayerSpec, prefix: str) -> Attention:
        spec = self._spec
        if layer.state is not None and spec.delta is not None:
            return self._delta_net(spec.delta, layer, layer.state, f"{prefix}linear_attn.")
        if layer.state is not None:
            return self._short_conv(f"{prefix}conv.")
        rope, prefix = self._ropes[spec.rope_types[layer.index]], f"{prefix}self_attn."
        if spec.latent is not None:
            return self._latent_attention(spec.latent, layer, rope, prefix)
        names = [prefix + name for name in attention_modules(spec, layer)]
        if layer.reads is not None:
            return self._reading_attention(layer, rope, prefix, names)
        rotates = spec.rope_types[layer.index] != NO_ROTATION
        order, gate = self._gated_columns(layer) if spec.gates_heads else (None, None)
        return HeadAttention(
            self._reader.ops,
            layer,
            rope,
            qkv=self._reader.linear(names, spec.qkv_bias),
            norm=self._head_norm(layer, prefix, rotates=rotates),
            order=self._order(layer, rope) if spec.interleaved and rotates else order,
            gate=gate,
            value_norm=self._reader.ones(layer.head_dim_v) if spec.value_norms else None,
            norm_eps=spec.norm_eps,
            sinks=self._reader.vector(f"{prefix}sinks") if layer.has_sinks else None,
        )

    def _gated_columns(self, layer: LayerSpec) -> tuple[Tensor, Tensor]:
        """Return the columns of queries, keys and values, and those of gates. In the checkpoint
        each head's gates follow its queries.
        """
        queries = torch.arange(2 * layer.num_heads * layer.head_dim).view(layer.num_heads, 2, -1)
        keys_and_values = layer.num_kv_heads * (layer.head_dim + layer.head_dim_v)
        rest = queries.numel() + torch.arange(keys_and_values)
        order = torch.cat((queries[:, 0].flatten(), rest))
        device = self._reader.ops.device
        return order.to(device), queries[:, 1].flatten().to(device)

    def _short_conv(self, prefix: str) -> ShortConv:
        has_bias, conv = self._spec.conv_bias, f"{prefix}conv."
        return ShortConv(
            self._reader.ops,
            inputs=self._reader.linear([f"{prefix}in_proj"], has_bias),
            conv=self._reader.vector(f"{conv}weight").squeeze(1).T.contiguous(),
            bias=self._reader.vector(f"{conv}bias") if has_bias else None,
        )

    def _delta_net(
        self, delta: DeltaSpec, layer: LayerSpec, state: StateSpec, prefix: str
    ) -> GatedDeltaNet:
        def vector(name: str) -> Tensor:
            return self._reader.vector(prefix + name)

        modules = [prefix + name for name in delta_modules(delta, state)]
        return GatedDeltaNet(
            self._reader.ops,
            layer,
            inputs=self._reader.linear(modules, False),
            columns=self._delta_columns(delta, state) if delta.is_fused else None,
            conv=vector("conv1d.weight").squeeze(1).T.contiguous(),
            rate=vector("A_log").exp(),
            bias=vector("dt_bias"),
            norm=vector("norm.weight"),
            norm_eps=self._spec.norm_eps,
        )

    def _delta_columns(self, delta: DeltaSpec, state: StateSpec) -> Tensor:
        """Return the columns of queries, keys, values, gates, corrections and decays. The
        checkpoint groups them by key head.
        """
        group = state.heads // delta.key_heads
        values = group * state.dim_v
        sizes = [state.dim, state.dim, values, values]
        heads = torch.arange(delta.key_heads * sum(sizes)).view(delta.key_heads, -1)
        last = heads.numel() + torch.arange(2 * state.heads).view(delta.key_heads, -1)
        parts = (*torch.split(heads, sizes, dim=1), *torch.split(last, group, dim=1))
        return torch.cat([part.flatten() for part in parts]).to(self._reader.ops.device)

    def _reading_attention(
        self, layer: LayerSpec, rope: Rope, prefix: str, names: Sequence[str]
    ) -> ReadingAttention:
        spec = self._spec
        return ReadingAttention(
            self._reader.ops,
            layer,
            rope,
            query=self._reader.linear(names, spec.qkv_bias),
            query_norm=self._reader.vector(f"{prefix}{spec.names.query_norm}.weight"),
            norm_eps=spec.norm_eps,
            norm_offset=spec.norm_offset,
        )

    def _order(self, layer: LayerSpec, rope: Rope) -> Tensor:
        """Return the columns of queries, keys and values. In each query and key head's rotated
        part, even columns come before odd ones.
        """
        rotated = torch.arange(2 * rope.cos.shape[1])
        rest = torch.arange(len(rotated), layer.head_dim)
        head = torch.cat((rotated[0::2], rotated[1::2], rest))
        starts = torch.arange(layer.num_heads + layer.num_kv_heads) * layer.head_dim
        heads = (starts.unsqueeze(1) + head).flatten()
        values = len(heads) + torch.arange(layer.num_kv_heads * layer.head_dim_v)
        return torch.cat((heads, values)).to(self._reader.ops.device)

    def _latent_attention(
        self, latent: LatentSpec, layer: LayerSpec, rope: Rope, prefix: str
    ) -> LatentAttention:
        has_rank = latent.query_rank is not None
        down = ["q_a_proj", "kv_a_proj_with_mqa"][not has_rank :]
        query = "q_b_proj" if has_rank else "q_proj"
        query_norm = None
        if has_rank:
            query_norm = self._reader.vector(f"{prefix}q_a_layernorm.weight")
        return LatentAttention(
            self._reader.ops,
            layer,
            latent,
            rope,
            self._spec.interleaved,
            down=self._reader.linear([prefix + name for name in down], latent.has_bias),
            query=self._reader.linear([prefix + query], False),
            query_norm=query_norm,
            latent_norm=self._reader.vector(f"{prefix}kv_a_layernorm.weight"),
            heads=self._reader.latent_heads(f"{prefix}kv_b_proj.weight", layer.num_heads, latent),
        )

    def _head_norm(self, layer: LayerSpec, prefix: str, *, rotates: bool) -> HeadNorm | None:
        spec = self._spec
        if spec.head_norms == "learned":
            query, key = (
                self._reader.vector(f"{prefix}{name}.weight")
                for name in (spec.names.query_norm, spec.names.key_norm)
            )
            return HeadNorm(query, key, spec.norm_eps, spec.norm_offset)
        if spec.head_norms is None or not rotates:
            return None
        # Norms without weights give the same before and after rotation.
        ones = self._reader.ones(layer.head_dim)
        return HeadNorm(ones, ones, spec.norm_eps, 0.0)
