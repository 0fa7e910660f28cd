"""Ops over the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBackend, AttentionBatch, LayerSpec
from penstock_shard.attention.cpu import CpuBackend
from penstock_shard.kernels.cpu import CpuKernels, KvCache, PackedWeight
from penstock_shard.kernels.cpu import WeightKind as KernelKind
from penstock_shard.kernels.cpu_recurrent import Steps
from penstock_shard.ops.base import (
    Activation,
    Experts,
    HeadNorm,
    Matrix,
    Rope,
    Routing,
    RoutingRule,
    WeightKind,
)
from penstock_shard.ops.experts import ExpertList, combine, route


class CpuMatrix:
    """A weight packed into the panels that the kernels read."""

    __slots__ = ("_kernels", "_packed")

    def __init__(self, kernels: CpuKernels, packed: PackedWeight) -> None:
        self._kernels = kernels
        self._packed = packed

    @property
    def out_features(self) -> int:
        return self._packed.n

    @property
    def in_features(self) -> int:
        return self._packed.k

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self._kernels.linear(x, self._packed, bias, out)

    @property
    def has_rows(self) -> bool:
        return self._packed.kind != "int8"

    def rows(self, ids: Tensor) -> Tensor:
        return self._packed.rows(ids)


class CpuOps:
    """See the module's docstring; activations are float32."""

    exact = True

    def __init__(self, kernels: CpuKernels, weights: KernelKind) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.weights: WeightKind = weights
        self.backend: AttentionBackend = CpuBackend(kernels)
        self._kind = weights
        self._kernels = kernels

    @property
    def keeps_tensors(self) -> bool:
        return False

    @property
    def dense_head(self) -> bool:
        return False

    def pack(self, parts: Sequence[Tensor], *, exact: bool = False) -> Matrix:
        return CpuMatrix(
            self._kernels, self._kernels.pack(parts, "float32" if exact else self._kind)
        )

    def pack_experts(
        self, experts: Iterable[Sequence[Tensor]], count: int, *, exact: bool = False
    ) -> Experts:
        return ExpertList(self.pack(parts, exact=exact) for parts in experts)

    def route(self, logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
        return route(logits, rule, bias)

    def combine(self, rows: Tensor, routing: Routing, out: Tensor | None = None) -> Tensor:
        return combine(rows, routing)

    def set_threads(self, count: int) -> None:
        self._kernels.set_threads(count)
        torch.set_num_threads(count)

    def scratch(self, *shape: int) -> Tensor:
        return torch.empty(shape)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._kernels.add_rms_norm(x, residual, weight, eps, offset, out)

    def gated_activation(
        self, gate_up: Tensor, kind: Activation, out: Tensor | None = None
    ) -> Tensor:
        return self._kernels.gated_activation(gate_up, kind, out)

    def rope_and_cache(
        self,
        qkv: Tensor,
        layer: LayerSpec,
        cache: KvCache,
        positions: Tensor,
        slots: Tensor,
        rope: Rope,
        norm: HeadNorm | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._kernels.rope_and_cache(
            qkv,
            cache,
            positions,
            slots,
            rope.cos,
            rope.sin,
            q_norm=None if norm is None else norm.query_weight,
            k_norm=None if norm is None else norm.key_weight,
            eps=0.0 if norm is None else norm.eps,
            weight_offset=0.0 if norm is None else norm.offset,
            out=out,
        )

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        *,
        silu: bool,
    ) -> Tensor:
        return self._kernels.recurrent.short_conv(x, weight, bias, state, _steps(batch), silu=silu)

    def delta_rule(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: AttentionBatch
    ) -> Tensor:
        return self._kernels.recurrent.delta_rule(qkv, decay, beta, state, _steps(batch))

    def decay(self, x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        return self._kernels.recurrent.decay(x, rate, bias)

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        return self._kernels.recurrent.selective_scan(x, dt, a, b, c, d, state, _steps(batch))

    def softplus(self, x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
        return self._kernels.recurrent.softplus(x, bias, low, high)


def _steps(batch: AttentionBatch) -> Steps:
    return Steps(batch.cu_queries, batch.seq_lens_tensor, batch.block_table)
