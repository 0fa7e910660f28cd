"""The tensors of a checkpoint -> the matrices and norms our decoder runs on.

Tensors are read one matrix at a time, packed, and their pages given back, so that the weights are
never in memory twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock_shard.errors import cannot_hold
from penstock_shard.models.decoder_spec import (
    DecoderSpec,
    ExpertsSpec,
    norm_names,
    tensor_shapes,
)
from penstock_shard.models.embedding_table import Embedding
from penstock_shard.models.feed_forward import Dense, FeedForward, Linear, Sparse
from penstock_shard.ops.base import Experts, HeadNorm, Matrix, Ops

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
        if name.endswith("norm.weight"):
            return torch.full(self._shapes[name], self._norm, device=self._device)
        made = torch.empty(self._shapes[name], device=self._device)
        return made.normal_(std=0.02, generator=self._generator)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Norms are float32 [H]; output norms are None for families without
    them.
    """

    input_norm: Tensor
    qkv: Linear
    head_norm: HeadNorm | None
    output: Linear
    output_norm: Tensor | None
    mlp_norm: Tensor
    feed_forward: FeedForward
    mlp_output_norm: Tensor | None


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
    spec: DecoderSpec, source: TensorSource, ops: Ops, progress: Callable[[str], None]
) -> DecoderWeights:
    """Read and pack all weights; `progress` gets a line every few seconds.

    Raises ModelError, naming the tensor, for a value that the kind of weights cannot hold.
    """
    return _Reader(spec, source, ops, progress).read()


class _Reader:
    def __init__(
        self,
        spec: DecoderSpec,
        source: TensorSource,
        ops: Ops,
        progress: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._source = source
        self._ops = ops
        self._progress = progress
        shapes = tensor_shapes(spec)
        self._sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        self._done = 0
        self._reported_s = time.monotonic()
        self._nbytes = 0

    def read(self) -> DecoderWeights:
        # The largest matrix first, while little else is in memory: packing it needs the most.
        head_name = "model.embed_tokens.weight" if self._spec.tied else "lm_head.weight"
        head = Linear(self._matrix([head_name], exact=self._ops.dense_head), None)
        shares = self._spec.tied and head.matrix.has_rows
        embedding = head.matrix if shares else self._embedding("model.embed_tokens.weight")
        layers = tuple(self._layer(layer.index) for layer in self._spec.layers)
        norm = self._vector(["model.norm.weight"], torch.float32)
        return DecoderWeights(embedding, layers, norm, head, self._nbytes)

    def _layer(self, index: int) -> LayerWeights:
        spec, prefix = self._spec, f"model.layers.{index}."
        norms = [
            self._vector([f"{prefix}{name}.weight"], torch.float32) for name in norm_names(spec)
        ]
        before, after = (norms[::2], norms[1::2]) if spec.output_norms else (norms, [None, None])
        attention = f"{prefix}self_attn."
        qkv = ["qkv_proj"] if spec.fused_tensors else ["q_proj", "k_proj", "v_proj"]
        return LayerWeights(
            input_norm=before[0],
            qkv=self._linear([attention + name for name in qkv], spec.qkv_bias),
            head_norm=self._head_norm(attention) if spec.head_norms else None,
            output=self._linear([attention + "o_proj"], spec.output_bias),
            output_norm=after[0],
            mlp_norm=before[1],
            feed_forward=self._feed_forward(index),
            mlp_output_norm=after[1],
        )

    def _feed_forward(self, index: int) -> FeedForward:
        spec, prefix = self._spec, f"model.layers.{index}."
        if spec.experts is not None and index in spec.experts.layers:
            return self._sparse(spec.experts, prefix)
        gate_up = ["gate_up_proj"] if spec.fused_tensors else ["gate_proj", "up_proj"]
        return Dense(
            self._ops,
            spec.activation,
            gate_up=self._linear([f"{prefix}mlp.{name}" for name in gate_up], spec.mlp_bias),
            down=self._linear([f"{prefix}mlp.down_proj"], spec.mlp_bias),
        )

    def _sparse(self, experts: ExpertsSpec, prefix: str) -> Sparse:
        names = experts.names
        return Sparse(
            self._ops,
            self._spec.activation,
            router=self._matrix([prefix + names.router], exact=True),
            gate_up=self._experts(prefix, experts.num_experts, (names.gate, names.up)),
            down=self._experts(prefix, experts.num_experts, (names.down,)),
            top_k=experts.top_k,
            normalised=experts.normalised,
        )

    def _head_norm(self, prefix: str) -> HeadNorm:
        query, key = (
            self._vector([f"{prefix}{name}_norm.weight"], torch.float32) for name in ("q", "k")
        )
        return HeadNorm(query, key, self._spec.norm_eps, self._spec.norm_offset)

    def _linear(self, names: Sequence[str], has_bias: bool) -> Linear:
        matrix = self._matrix([f"{name}.weight" for name in names])
        biases = [f"{name}.bias" for name in names]
        return Linear(matrix, self._vector(biases, self._ops.dtype) if has_bias else None)

    def _experts(self, prefix: str, count: int, patterns: Sequence[str]) -> Experts:
        """Packs the tensors of these names for every expert; those of one expert become one matrix,
        one below the other.
        """
        reading: Sequence[str] = ()

        def parts() -> Iterator[list[Tensor]]:
            nonlocal reading
            for expert in range(count):
                reading = [prefix + pattern.format(expert) for pattern in patterns]
                with self._source.read(reading) as tensors:
                    yield tensors
                self._count(reading, 0)

        try:
            experts = self._ops.pack_experts(parts(), count)
        except ValueError as error:
            raise cannot_hold(", ".join(reading), error, self._ops.weights) from error
        self._nbytes += experts.nbytes
        return experts

    def _matrix(self, names: Sequence[str], *, exact: bool = False) -> Matrix:
        with self._source.read(names) as parts:
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
