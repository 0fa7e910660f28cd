"""A checkpoint's tensors -> our decoder's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.attention.base import LayerSpec
from penstock_shard.models.decoder.attention_weights import AttentionWeights
from penstock_shard.models.decoder.feed_forward import FeedForward
from penstock_shard.models.decoder.feed_forward_weights import FeedForwardWeights
from penstock_shard.models.decoder.linear import Linear
from penstock_shard.models.decoder.self_attention import Attention
from penstock_shard.models.decoder.spec import DecoderSpec, norm_names, output_module
from penstock_shard.models.decoder.tensor_reader import TensorReader, TensorSource
from penstock_shard.models.embedding_table import Embedding
from penstock_shard.ops.base import Matrix, Ops, Rope


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights. Norms are float32 [H]; output norms are None in families
    without them.
    """

    input_norm: Tensor
    attention: Attention
    output: Linear
    output_norm: Tensor | None
    mlp_norm: Tensor
    feed_forward: FeedForward
    mlp_output_norm: Tensor | None
    # Multiplies the residual stream after the layer.
    scalar: float

    def change(self, change: Callable[[Linear], Linear]) -> LayerWeights:
        return dataclasses.replace(
            self,
            attention=self.attention.change(change),
            output=change(self.output),
            feed_forward=self.feed_forward.change(change),
        )


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    # In a tied model, the head's matrix if it can return rows.
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
    """Read and pack all weights. `ropes` has a table for each of the spec's rope types. `progress`
    gets a line every few seconds.

    Raises ModelError, which names the tensor, for a value that the type of weights cannot hold.
    """
    reader = TensorReader(spec, source, ops, progress)
    # Pack the largest matrix first: packing needs memory, and little else is loaded yet.
    head_name = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    head = Linear(reader.matrix([head_name], exact=ops.dense_head), None)
    shares = spec.tied and head.matrix.has_rows
    embedding = head.matrix if shares else reader.embedding("model.embed_tokens.weight")
    attention = AttentionWeights(spec, ropes, reader)
    feed_forward = FeedForwardWeights(spec, reader)
    layers = tuple(
        _read_layer(spec, layer, reader, attention, feed_forward) for layer in spec.layers
    )
    norm = reader.vector(f"{spec.names.final_norm}.weight")
    return DecoderWeights(embedding, layers, norm, head, reader.nbytes)


def _read_layer(
    spec: DecoderSpec,
    layer: LayerSpec,
    reader: TensorReader,
    attention: AttentionWeights,
    parts: FeedForwardWeights,
) -> LayerWeights:
    prefix = f"model.layers.{layer.index}."
    norms = [reader.vector(f"{prefix}{name}.weight") for name in norm_names(spec)]
    before, after = (norms[::2], norms[1::2]) if spec.output_norms else (norms, [None, None])
    mlp_norm, scalar = before[1], 1.0
    if spec.layer_scalars:
        scalar = float(reader.vector(f"{prefix}layer_scalar"))
    experts = spec.experts if spec.has_experts(layer.index) else None
    if experts is None:
        feed_forward: FeedForward = parts.dense(prefix + spec.names.feed_forward)
    elif experts.beside_dense:
        feed_forward = parts.dense_and_sparse(experts, prefix, mlp_norm)
        mlp_norm = torch.ones_like(mlp_norm)
    else:
        feed_forward = parts.sparse(experts, prefix)
    return LayerWeights(
        input_norm=before[0],
        attention=attention.read(layer, prefix),
        output=reader.linear([prefix + output_module(spec, layer)], spec.has_output_bias(layer)),
        output_norm=after[0],
        mlp_norm=mlp_norm,
        feed_forward=feed_forward,
        mlp_output_norm=after[1],
        scalar=scalar,
    )
