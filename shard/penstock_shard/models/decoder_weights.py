"""The tensors of a checkpoint -> the matrices and norms our decoder runs on.

Tensors are read one matrix at a time, packed, and their pages given back, so that the weights are
never in memory twice. Knows names of tensors; knows nothing of how layers are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock_shard.models.decoder_spec import DecoderSpec, norm_names, tensor_shapes
from penstock_shard.models.embedding import Embedding
from penstock_shard.models.errors import cannot_hold
from penstock_shard.models.ops.base import HeadNorm, Matrix, Ops

_REPORT_S = 3.0


class TensorSource(Protocol):
    """Where tensors come from."""

    def read(self, names: Sequence[str]) -> AbstractContextManager[list[Tensor]]:
        """The tensors, good until the context ends."""


class RandomTensors:
    """Made-up weights for a spec: the same ones each time, norms near 1."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._shapes = tensor_shapes(spec)
        self._generator = torch.Generator().manual_seed(0)
        self._norm = 1.0 - spec.norm_offset

    @contextmanager
    def read(self, names: Sequence[str]) -> Iterator[list[Tensor]]:
        yield [self._make(name) for name in names]

    def _make(self, name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.full(self._shapes[name], self._norm)
        return torch.randn(self._shapes[name], generator=self._generator) * 0.02


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix and its bias."""

    matrix: Matrix
    bias: Tensor | None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.matrix.linear(x, self.bias, out)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms are float32 [H]; those of outputs are None where there are none."""

    input_norm: Tensor
    qkv: Linear
    head_norm: HeadNorm | None
    output: Linear
    output_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_output_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of a decoder."""

    # Of a tied model the head's own matrix, where its rows can be had.
    embedding: Embedding | Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    nbytes: int


def read_weights(
    spec: DecoderSpec, source: TensorSource, ops: Ops, progress: Callable[[str], None]
) -> DecoderWeights:
    """Read and pack all weights; `progress` gets a line now and then.

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
        # The largest first, while little else is in memory.
        head_name = "model.embed_tokens.weight" if self._spec.tied else "lm_head.weight"
        head = Linear(self._matrix([head_name]), None)
        shares = self._spec.tied and head.matrix.has_rows
        embedding = head.matrix if shares else self._embedding("model.embed_tokens.weight")
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(len(self._spec.layers)))
        norm = self._vector(["model.norm.weight"], torch.float32)
        return DecoderWeights(embedding, layers, norm, head, self._nbytes)

    def _layer(self, prefix: str) -> LayerWeights:
        spec = self._spec
        norms = [
            self._vector([f"{prefix}{name}.weight"], torch.float32) for name in norm_names(spec)
        ]
        before, after = (norms[::2], norms[1::2]) if spec.output_norms else (norms, [None, None])
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        fused = spec.fused_tensors
        qkv = ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]
        gate_up = ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]
        return LayerWeights(
            input_norm=before[0],
            qkv=self._linear([attention + name for name in qkv], spec.qkv_bias),
            head_norm=self._head_norm(attention) if spec.head_norms else None,
            output=self._linear([attention + "o_proj"], spec.output_bias),
            output_norm=after[0],
            mlp_norm=before[1],
            gate_up=self._linear([mlp + name for name in gate_up], spec.mlp_bias),
            down=self._linear([mlp + "down_proj"], spec.mlp_bias),
            mlp_output_norm=after[1],
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

    def _matrix(self, names: Sequence[str]) -> Matrix:
        with self._source.read(names) as parts:
            try:
                matrix = self._ops.pack(parts)
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
