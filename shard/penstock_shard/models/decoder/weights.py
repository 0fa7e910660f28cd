"""The tensors of a checkpoint -> the matrices and norms our decoder runs on.

Tensors are read one matrix at a time, packed, and their pages given back, so that the weights are
never in memory twice.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock_shard.attention.base import LayerSpec, StateSpec
from penstock_shard.errors import cannot_hold
from penstock_shard.models.decoder.feed_forward import Dense, DenseAndSparse, FeedForward, Sparse
from penstock_shard.models.decoder.gated_delta_net import GatedDeltaNet
from penstock_shard.models.decoder.linear import Linear
from penstock_shard.models.decoder.self_attention import (
    Attention,
    HeadAttention,
    LatentAttention,
    ReadingAttention,
)
from penstock_shard.models.decoder.short_conv import ShortConv
from penstock_shard.models.decoder.spec import (
    EXPERT_NORMS,
    NO_ROTATION,
    DecoderSpec,
    DeltaSpec,
    ExpertsSpec,
    LatentSpec,
    attention_modules,
    delta_modules,
    norm_names,
    output_module,
    tensor_shapes,
)
from penstock_shard.models.embedding_table import Embedding
from penstock_shard.models.latent_heads import LatentHeads
from penstock_shard.ops.base import Experts, HeadNorm, Matrix, Ops, Rope

_REPORT_S = 3.0


class TensorSource(Protocol):
    """Where `read_weights` gets tensors from."""

    def read(self, names: Sequence[str]) -> AbstractContextManager[list[Tensor]]:
        """The tensors, good until the context ends."""


class RandomTensors:
    """Random weights for a spec: the same on every load on one type of device; norms near 1."""

    def __init__(self, spec: DecoderSpec, device: torch.device) -> None:
        """The weights are drawn on the device: on a CPU a large model would take minutes."""
        self._shapes = tensor_shapes(spec)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._norm = 1.0 - spec.norm_offset

    @contextmanager
    def read(self, names: Sequence[str]) -> Iterator[list[Tensor]]:
        yield [self._make(name) for name in names]

    def _make(self, name: str) -> Tensor:
        if len(self._shapes[name]) == 1 and not name.endswith("bias"):
            # The norm of a state's outputs is stored as it is, whatever other norms are.
            value = 1.0 if name.endswith("linear_attn.norm.weight") else self._norm
            return torch.full(self._shapes[name], value, device=self._device)
        made = torch.empty(self._shapes[name], device=self._device)
        return made.normal_(std=0.02, generator=self._generator)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Norms are float32 [H]; output norms are None for families without
    them.
    """

    input_norm: Tensor
    attention: Attention
    output: Linear
    output_norm: Tensor | None
    mlp_norm: Tensor
    feed_forward: FeedForward
    mlp_output_norm: Tensor | None
    # What the residual stream is multiplied by after the layer.
    scalar: float

    def change(self, change: Callable[[Linear], Linear]) -> LayerWeights:
        """The same with each of its linear layers changed."""
        return dataclasses.replace(
            self,
            attention=self.attention.change(change),
            output=change(self.output),
            feed_forward=self.feed_forward.change(change),
        )


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a decoder."""

    # In a tied model the head's own matrix, if it can give rows.
    embedding: Embedding | Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    nbytes: int


def read_weights(
    spec: DecoderSpec,
    source: TensorSource,
    ropes: Mapping[str, Rope],
    ops: Ops,
    progress: Callable[[str], None],
) -> DecoderWeights:
    """Read and pack all weights; `ropes` has a table for each of the spec's rope types, `progress`
    gets a line every few seconds.

    Raises ModelError, naming the tensor, for a value that the kind of weights cannot hold.
    """
    return _Reader(spec, source, ropes, ops, progress).read()


class _Reader:
    def __init__(
        self,
        spec: DecoderSpec,
        source: TensorSource,
        ropes: Mapping[str, Rope],
        ops: Ops,
        progress: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._source = source
        self._ropes = ropes
        self._ops = ops
        self._progress = progress
        self._shapes = tensor_shapes(spec)
        self._sizes = {name: torch.Size(shape).numel() for name, shape in self._shapes.items()}
        self._done = 0
        self._reported_s = time.monotonic()
        self._nbytes = 0

    def read(self) -> DecoderWeights:
        # The largest matrix first, while little else is in memory: packing it needs the most.
        head_name = "model.embed_tokens.weight" if self._spec.tied else "lm_head.weight"
        head = Linear(self._matrix([head_name], exact=self._ops.dense_head), None)
        shares = self._spec.tied and head.matrix.has_rows
        embedding = head.matrix if shares else self._embedding("model.embed_tokens.weight")
        layers = tuple(self._layer(layer) for layer in self._spec.layers)
        norm = self._vector([f"{self._spec.names.final_norm}.weight"], torch.float32)
        return DecoderWeights(embedding, layers, norm, head, self._nbytes)

    def _layer(self, layer: LayerSpec) -> LayerWeights:
        spec, prefix = self._spec, f"model.layers.{layer.index}."
        norms = [
            self._vector([f"{prefix}{name}.weight"], torch.float32) for name in norm_names(spec)
        ]
        before, after = (norms[::2], norms[1::2]) if spec.output_norms else (norms, [None, None])
        mlp_norm, scalar = before[1], 1.0
        is_conv = layer.state is not None and spec.delta is None
        output_bias = spec.conv_bias if is_conv else spec.output_bias
        if spec.layer_scalars:
            scalar = float(self._vector([f"{prefix}layer_scalar"], torch.float32))
        experts = spec.experts if spec.has_experts(layer.index) else None
        if experts is None:
            feed_forward: FeedForward = self._dense(prefix + spec.names.feed_forward)
        elif experts.beside_dense:
            feed_forward = self._dense_and_sparse(experts, prefix, mlp_norm)
            mlp_norm = torch.ones_like(mlp_norm)
        else:
            feed_forward = self._sparse(experts, prefix)
        return LayerWeights(
            input_norm=before[0],
            attention=self._attention(layer, prefix),
            output=self._linear([prefix + output_module(spec, layer)], output_bias),
            output_norm=after[0],
            mlp_norm=mlp_norm,
            feed_forward=feed_forward,
            mlp_output_norm=after[1],
            scalar=scalar,
        )

    def _attention(self, layer: LayerSpec, prefix: str) -> Attention:
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
            self._ops,
            layer,
            rope,
            qkv=self._linear(names, spec.qkv_bias),
            norm=self._head_norm(layer, prefix, rotates=rotates),
            order=self._order(layer, rope) if spec.interleaved and rotates else order,
            gate=gate,
            value_norm=self._ones(layer.head_dim_v) if spec.value_norms else None,
            norm_eps=spec.norm_eps,
        )

    def _gated_columns(self, layer: LayerSpec) -> tuple[Tensor, Tensor]:
        """The columns of queries, keys and values, and those of gates, each behind its query."""
        queries = torch.arange(2 * layer.num_heads * layer.head_dim).view(layer.num_heads, 2, -1)
        keys_and_values = layer.num_kv_heads * (layer.head_dim + layer.head_dim_v)
        rest = queries.numel() + torch.arange(keys_and_values)
        order = torch.cat((queries[:, 0].flatten(), rest))
        return order.to(self._ops.device), queries[:, 1].flatten().to(self._ops.device)

    def _short_conv(self, prefix: str) -> ShortConv:
        has_bias, conv = self._spec.conv_bias, f"{prefix}conv."
        return ShortConv(
            self._ops,
            inputs=self._linear([f"{prefix}in_proj"], has_bias),
            conv=self._vector([f"{conv}weight"], torch.float32).squeeze(1).T.contiguous(),
            bias=self._vector([f"{conv}bias"], torch.float32) if has_bias else None,
        )

    def _delta_net(
        self, delta: DeltaSpec, layer: LayerSpec, state: StateSpec, prefix: str
    ) -> GatedDeltaNet:
        def vector(name: str) -> Tensor:
            return self._vector([prefix + name], torch.float32)

        modules = [prefix + name for name in delta_modules(delta, state)]
        return GatedDeltaNet(
            self._ops,
            layer,
            inputs=self._linear(modules, False),
            columns=self._delta_columns(delta, state) if delta.is_fused else None,
            conv=vector("conv1d.weight").squeeze(1).T.contiguous(),
            rate=vector("A_log").exp(),
            bias=vector("dt_bias"),
            norm=vector("norm.weight"),
            norm_eps=self._spec.norm_eps,
        )

    def _delta_columns(self, delta: DeltaSpec, state: StateSpec) -> Tensor:
        """Where queries, keys, values, gates, corrections and decays are, of each key head's."""
        group = state.heads // delta.key_heads
        values = group * state.dim_v
        sizes = [state.dim, state.dim, values, values]
        heads = torch.arange(delta.key_heads * sum(sizes)).view(delta.key_heads, -1)
        last = heads.numel() + torch.arange(2 * state.heads).view(delta.key_heads, -1)
        parts = (*torch.split(heads, sizes, dim=1), *torch.split(last, group, dim=1))
        return torch.cat([part.flatten() for part in parts]).to(self._ops.device)

    def _reading_attention(
        self, layer: LayerSpec, rope: Rope, prefix: str, names: Sequence[str]
    ) -> ReadingAttention:
        spec = self._spec
        return ReadingAttention(
            self._ops,
            layer,
            rope,
            query=self._linear(names, spec.qkv_bias),
            query_norm=self._vector([f"{prefix}{spec.names.query_norm}.weight"], torch.float32),
            norm_eps=spec.norm_eps,
            norm_offset=spec.norm_offset,
        )

    def _ones(self, count: int) -> Tensor:
        return torch.ones(count, device=self._ops.device)

    def _order(self, layer: LayerSpec, rope: Rope) -> Tensor:
        """The columns of queries, keys and values: of what is rotated of each query and key head
        first the even ones, then the odd ones.
        """
        rotated = torch.arange(2 * rope.cos.shape[1])
        rest = torch.arange(len(rotated), layer.head_dim)
        head = torch.cat((rotated[0::2], rotated[1::2], rest))
        starts = torch.arange(layer.num_heads + layer.num_kv_heads) * layer.head_dim
        heads = (starts.unsqueeze(1) + head).flatten()
        values = len(heads) + torch.arange(layer.num_kv_heads * layer.head_dim_v)
        return torch.cat((heads, values)).to(self._ops.device)

    def _latent_attention(
        self, latent: LatentSpec, layer: LayerSpec, rope: Rope, prefix: str
    ) -> LatentAttention:
        has_rank = latent.query_rank is not None
        down = ["q_a_proj", "kv_a_proj_with_mqa"][not has_rank :]
        query = "q_b_proj" if has_rank else "q_proj"
        query_norm = None
        if has_rank:
            query_norm = self._vector([f"{prefix}q_a_layernorm.weight"], torch.float32)
        return LatentAttention(
            self._ops,
            layer,
            latent,
            rope,
            self._spec.interleaved,
            down=self._linear([prefix + name for name in down], latent.has_bias),
            query=self._linear([prefix + query], False),
            query_norm=query_norm,
            latent_norm=self._vector([f"{prefix}kv_a_layernorm.weight"], torch.float32),
            heads=self._latent_heads(f"{prefix}kv_b_proj.weight", layer.num_heads, latent),
        )

    def _latent_heads(self, name: str, num_heads: int, latent: LatentSpec) -> LatentHeads:
        with self._source.read([name]) as (weight,):
            try:
                heads = LatentHeads.of(weight, num_heads, latent.plain, self._ops)
            except ValueError as error:
                raise cannot_hold(name, error, self._ops.weights) from error
        self._count([name], heads.keys.nbytes + heads.values.nbytes)
        return heads

    def _dense(self, module: str) -> Dense:
        spec = self._spec
        names = spec.names
        gate_up = ["gate_up_proj"] if spec.fused_tensors else [names.gate, names.up]
        return Dense(
            self._ops,
            spec.activation,
            gate_up=self._linear([f"{module}.{name}" for name in gate_up], spec.mlp_bias),
            down=self._linear([f"{module}.{names.down}"], spec.mlp_bias),
        )

    def _dense_and_sparse(
        self, experts: ExpertsSpec, prefix: str, input_weight: Tensor
    ) -> DenseAndSparse:
        norms = [
            self._vector([f"{prefix}{name}.weight"], torch.float32)
            for name in ("post_feedforward_layernorm_1", *EXPERT_NORMS)
        ]
        own = self._vector([f"{prefix}router.scale"], torch.float32)
        sparse = self._sparse(
            experts,
            prefix,
            router_scale=own * self._spec.hidden_size**-0.5,
            scales=self._vector([f"{prefix}router.per_expert_scale"], torch.float32).tolist(),
        )
        return DenseAndSparse(
            self._ops,
            self._dense(prefix + self._spec.names.feed_forward),
            dataclasses.replace(sparse, input_weight=norms[1].to(self._ops.dtype)),
            input_weight=input_weight.to(self._ops.dtype),
            dense_norm=norms[0],
            sparse_norm=norms[2],
            norm_eps=self._spec.norm_eps,
        )

    def _sparse(
        self,
        experts: ExpertsSpec,
        prefix: str,
        *,
        router_scale: Tensor | None = None,
        scales: Sequence[float] | None = None,
    ) -> Sparse:
        """`router_scale` [H] multiplies the router's inputs, `scales` each expert's output: both
        are made part of the matrices.
        """
        names, bias = experts.names, None
        if names.bias is not None:
            bias = self._vector([prefix + names.bias], torch.float32)
        return Sparse(
            self._ops,
            self._spec.activation,
            experts.rule,
            router=self._matrix([prefix + names.router], exact=True, scale=router_scale),
            bias=bias,
            gate_up=self._experts(prefix, experts.num_experts, (names.gate, names.up)),
            down=self._experts(prefix, experts.num_experts, (names.down,), scales),
            shared=None if names.shared is None else self._dense(prefix + names.shared),
            shared_gate=None
            if names.shared_gate is None
            else self._matrix([prefix + names.shared_gate], exact=True),
            scales_inputs=experts.scales_inputs,
        )

    def _head_norm(self, layer: LayerSpec, prefix: str, *, rotates: bool) -> HeadNorm | None:
        spec = self._spec
        if spec.head_norms == "learned":
            query, key = (
                self._vector([f"{prefix}{name}.weight"], torch.float32)
                for name in (spec.names.query_norm, spec.names.key_norm)
            )
            return HeadNorm(query, key, spec.norm_eps, spec.norm_offset)
        if spec.head_norms is None or not rotates:
            return None
        # Norms without weights are the same before a rotation and after it.
        ones = self._ones(layer.head_dim)
        return HeadNorm(ones, ones, spec.norm_eps, 0.0)

    def _linear(self, names: Sequence[str], has_bias: bool) -> Linear:
        weights = [f"{name}.weight" for name in names]
        matrix = self._matrix(weights)
        biases = [f"{name}.bias" for name in names]
        bias = self._vector(biases, self._ops.dtype) if has_bias else None
        rows = [self._shapes[weight][0] for weight in weights]
        return Linear(matrix, bias, tuple(zip(names, rows, strict=True)))

    def _experts(
        self,
        prefix: str,
        count: int,
        patterns: Sequence[str],
        scales: Sequence[float] | None = None,
    ) -> Experts:
        """Packs the tensors of these names for every expert, times its scale; those of one expert
        become one matrix, one below the other.
        """
        reading: Sequence[str] = ()

        def parts() -> Iterator[list[Tensor]]:
            nonlocal reading
            for expert in range(count):
                reading = [prefix + pattern.format(expert) for pattern in patterns]
                with self._source.read(reading) as tensors:
                    if scales is not None:
                        tensors = [part.float() * scales[expert] for part in tensors]
                    yield tensors
                self._count(reading, 0)

        try:
            experts = self._ops.pack_experts(parts(), count)
        except ValueError as error:
            raise cannot_hold(", ".join(reading), error, self._ops.weights) from error
        self._nbytes += experts.nbytes
        return experts

    def _matrix(
        self, names: Sequence[str], *, exact: bool = False, scale: Tensor | None = None
    ) -> Matrix:
        """`scale` [K] multiplies the matrix's inputs."""
        with self._source.read(names) as parts:
            if scale is not None:
                parts = [part.to(scale.device) * scale for part in parts]
            try:
                matrix = self._ops.pack(parts, exact=exact)
            except ValueError as error:
                raise cannot_hold(", ".join(names), error, self._ops.weights) from error
        self._count(names, matrix.nbytes)
        return matrix

    def _embedding(self, name: str) -> Embedding:
        with self._source.read([name]) as (table,):
            try:
                embedding = Embedding(table, self._ops)
            except ValueError as error:
                raise cannot_hold(name, error, self._ops.weights) from error
        self._count([name], embedding.table.nbytes)
        return embedding

    def _vector(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        with self._source.read(names) as parts:
            vector = torch.cat([part.to(self._ops.device, dtype) for part in parts])
        self._count(names, vector.nbytes)
        return vector

    def _count(self, names: Sequence[str], nbytes: int) -> None:
        self._nbytes += nbytes
        self._done += sum(self._sizes[name] for name in names)
        now = time.monotonic()
        if now - self._reported_s >= _REPORT_S:
            self._reported_s = now
            percent = 100 * self._done // sum(self._sizes.values())
            self._progress(f"loading weights: {min(percent, 100)} %")
