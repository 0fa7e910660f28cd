"""Reads tensors of a checkpoint as packed matrices and vectors.

Each matrix is read and packed, and its file pages are given back, before the next: the weights are
never in memory twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from penstock_shard.checkpoint.codes.codes import Codes
from penstock_shard.errors import cannot_hold
from penstock_shard.models.decoder.linear import Linear
from penstock_shard.models.decoder.spec import DecoderSpec, LatentSpec, tensor_shapes
from penstock_shard.models.embedding_table import Embedding
from penstock_shard.models.latent_heads import LatentHeads
from penstock_shard.ops.base import Experts, Matrix, Ops
from penstock_shard.ops.experts import ExpertList

_REPORT_S = 3.0


class TensorSource(Protocol):
    def read(self, names: Sequence[str]) -> AbstractContextManager[list[Tensor]]:
        """The tensors are valid inside the context."""

    def codes(self, name: str) -> Codes | None:
        """Return the stored codes; None if the matrix is not stored as codes."""


class RandomTensors:
    """Random weights for a spec, equal on every load on one device type. Norms are near 1."""

    def __init__(self, spec: DecoderSpec, device: torch.device) -> None:
        """Draw weights on the device: a CPU would take minutes for a large model."""
        self._shapes = tensor_shapes(spec)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._norm = 1.0 - spec.norm_offset

    @contextmanager
    def read(self, names: Sequence[str]) -> Iterator[list[Tensor]]:
        yield [self._make(name) for name in names]

    def codes(self, name: str) -> None:
        """Random weights are not codes."""

    def _make(self, name: str) -> Tensor:
        if len(self._shapes[name]) == 1 and not name.endswith("bias"):
            # Unlike other norms, that of a state's outputs is stored without offset.
            value = 1.0 if name.endswith("linear_attn.norm.weight") else self._norm
            return torch.full(self._shapes[name], value, device=self._device)
        made = torch.empty(self._shapes[name], device=self._device)
        return made.normal_(std=0.02, generator=self._generator)


class TensorReader:
    """Reads a spec's tensors from a source. `progress` gets a line every few seconds.

    Methods raise ModelError, which names the tensor, for a value that the type of weights cannot
    hold.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        source: TensorSource,
        ops: Ops,
        progress: Callable[[str], None],
    ) -> None:
        self.ops = ops
        self.nbytes = 0
        self._source = source
        self._progress = progress
        self._shapes = tensor_shapes(spec)
        self._sizes = {name: torch.Size(shape).numel() for name, shape in self._shapes.items()}
        self._done = 0
        self._reported_s = time.monotonic()

    def linear(self, names: Sequence[str], has_bias: bool) -> Linear:
        weights = [f"{name}.weight" for name in names]
        matrix = self.matrix(weights)
        biases = [f"{name}.bias" for name in names]
        bias = self.vectors(biases, self.ops.dtype) if has_bias else None
        rows = [self._shapes[weight][0] for weight in weights]
        return Linear(matrix, bias, tuple(zip(names, rows, strict=True)))

    def experts(
        self,
        prefix: str,
        count: int,
        patterns: Sequence[str],
        scales: Sequence[float] | None = None,
    ) -> Experts:
        """Pack these tensors of every expert, multiplied by the expert's scale. An expert's tensors
        are stacked into one matrix.
        """
        names = [[prefix + each.format(expert) for each in patterns] for expert in range(count)]
        if scales is None and self._codes(names[0]) is not None:
            return ExpertList(self.matrix(each) for each in names)
        reading: Sequence[str] = ()

        def parts() -> Iterator[list[Tensor]]:
            nonlocal reading
            for expert, reading in enumerate(names):
                with self._source.read(reading) as tensors:
                    if scales is not None:
                        tensors = [part.float() * scales[expert] for part in tensors]
                    yield tensors
                self._count(reading, 0)

        try:
            experts = self.ops.pack_experts(parts(), count)
        except ValueError as error:
            raise cannot_hold(", ".join(reading), error, self.ops.weights) from error
        self.nbytes += experts.nbytes
        return experts

    def matrix(
        self, names: Sequence[str], *, exact: bool = False, scale: Tensor | None = None
    ) -> Matrix:
        """Read tensors as one matrix. `scale` [K] multiplies its inputs."""
        codes = None if exact or scale is not None else self._codes(names)
        if codes is not None:
            self._count(names, codes.nbytes)
            return codes
        with self._source.read(names) as parts:
            if scale is not None:
                parts = [part.to(scale.device) * scale for part in parts]
            try:
                matrix = self.ops.pack(parts, exact=exact)
            except ValueError as error:
                raise cannot_hold(", ".join(names), error, self.ops.weights) from error
        self._count(names, matrix.nbytes)
        return matrix

    def _codes(self, names: Sequence[str]) -> Matrix | None:
        """The matrix in codes, if all tensors are codes and these ops multiply codes."""
        if self.ops.pack_codes is None:
            return None
        codes = [found for name in names if (found := self._source.codes(name)) is not None]
        return self.ops.pack_codes(codes) if len(codes) == len(names) else None

    def embedding(self, name: str) -> Embedding | Matrix:
        codes = self._codes([name])
        if codes is not None and codes.has_rows:
            self._count([name], codes.nbytes)
            return codes
        with self._source.read([name]) as (table,):
            try:
                embedding = Embedding(table, self.ops)
            except ValueError as error:
                raise cannot_hold(name, error, self.ops.weights) from error
        self._count([name], embedding.table.nbytes)
        return embedding

    def vectors(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Read tensors and concatenate them on the device."""
        with self._source.read(names) as parts:
            vector = torch.cat([part.to(self.ops.device, dtype) for part in parts])
        self._count(names, vector.nbytes)
        return vector

    def vector(self, name: str) -> Tensor:
        return self.vectors([name], torch.float32)

    def _count(self, names: Sequence[str], nbytes: int) -> None:
        self.nbytes += nbytes
        self._done += sum(self._sizes[name] for name in names)
        now = time.monotonic()
        if now - self._reported_s >= _REPORT_S:
            self._reported_s = now
            percent = 100 * self._done // sum(self._sizes.values())
            self._progress(f"loading weights: {min(percent, 100)} %")

    def ones(self, count: int) -> Tensor:
        return torch.ones(count, device=self.ops.device)

    def latent_heads(self, name: str, num_heads: int, latent: LatentSpec) -> LatentHeads:
        with self._source.read([name]) as (weight,):
            try:
                heads = LatentHeads.of(weight, num_heads, latent.plain, self.ops)
            except ValueError as error:
                raise cannot_hold(name, error, self.ops.weights) from error
        self._count([name], heads.keys.nbytes + heads.values.nbytes)
        return heads
