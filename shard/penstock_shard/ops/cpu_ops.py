"""Ops over the CPU kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBackend, AttentionBatch, LayerSpec
from penstock_shard.attention.cpu import CpuBackend
from penstock_shard.checkpoint.codes.codes import Codes
from penstock_shard.kernels.cpu import CpuKernels, KvCache
from penstock_shard.kernels.cpu_recurrent import Steps
from penstock_shard.kernels.weight_layouts import CodeLayout, PackedWeight
from penstock_shard.kernels.weight_layouts import WeightKind as KernelKind
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

# Groups of codes are multiples of 8.
UNIT = 8


class CpuMatrix:
    """A weight packed into the panels that the kernels read: stacked parts with their own
    layouts.
    """

    __slots__ = ("_kernels", "_order", "_parts", "has_rows")

    def __init__(
        self,
        kernels: CpuKernels,
        parts: Sequence[PackedWeight],
        *,
        has_rows: bool,
        order: Tensor | None = None,
    ) -> None:
        """Column i of the weight multiplies input `order[i]` (int64 [K]), or input i without
        `order`.
        """
        self._kernels = kernels
        self._parts = parts
        self._order = order
        self.has_rows = has_rows

    @property
    def out_features(self) -> int:
        return sum(part.n for part in self._parts)

    @property
    def in_features(self) -> int:
        return self._parts[0].k

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        if len(self._parts) == 1:
            return self._kernels.linear(x, self._parts[0], bias, out)
        if out is None:
            out = x.new_empty(len(x), self.out_features)
        first = 0
        for part in self._parts:
            some = None if bias is None else bias[first : first + part.n]
            self._kernels.linear(x, part, some, out[:, first : first + part.n])
            first += part.n
        return out

    def rows(self, ids: Tensor) -> Tensor:
        return self._kernels.rows(self._parts[0], ids)


class CpuOps:
    """Ops over the CPU kernels; activations are float32."""

    exact = True

    def __init__(self, kernels: CpuKernels, weights: KernelKind | Literal["codes"]) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.weights: WeightKind = weights
        self.backend: AttentionBackend = CpuBackend(kernels)
        self._kind: KernelKind = "float16" if weights == "codes" else weights
        self.kernels = kernels

    @property
    def keeps_tensors(self) -> bool:
        return False

    @property
    def dense_head(self) -> bool:
        return False

    def pack(self, parts: Sequence[Tensor], *, exact: bool = False) -> Matrix:
        kind = "float32" if exact else self._kind
        has_rows = kind not in ("int8", "int4")
        return CpuMatrix(self.kernels, [self.kernels.pack(parts, kind)], has_rows=has_rows)

    def look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        return self.kernels.look_up(table, ids)

    @property
    def pack_codes(self) -> Callable[[Sequence[Codes]], Matrix] | None:
        return self._pack_codes if self.weights == "codes" else None

    def _pack_codes(self, parts: Sequence[Codes]) -> Matrix:
        in_halves = all(_fit_halves(part) for part in parts)
        layouts = [_layout(part, in_halves) for part in parts]
        order = parts[0].order
        if None in layouts or not all(_is_same(part.order, order) for part in parts):
            return self.pack([part.dense() for part in parts])
        packed = [
            self.kernels.pack_codes(
                [(part.values, part.scales, part.minimums) for _, part in run], layout
            )
            for layout, run in itertools.groupby(
                zip(layouts, parts, strict=True), key=itemgetter(0)
            )
            if layout is not None
        ]
        has_rows = len(packed) == 1 and order is None
        return CpuMatrix(self.kernels, packed, has_rows=has_rows, order=order)

    def pack_experts(
        self, experts: Iterable[Sequence[Tensor]], count: int, *, exact: bool = False
    ) -> Experts:
        return ExpertList(self.pack(parts, exact=exact) for parts in experts)

    def route(self, logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
        return route(logits, rule, bias)

    def combine(self, rows: Tensor, routing: Routing, out: Tensor | None = None) -> Tensor:
        return combine(rows, routing)

    def set_threads(self, count: int) -> None:
        self.kernels.set_threads(count)
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
        return self.kernels.add_rms_norm(x, residual, weight, eps, offset, out)

    def gated_activation(
        self, gate_up: Tensor, kind: Activation, out: Tensor | None = None
    ) -> Tensor:
        return self.kernels.gated_activation(gate_up, kind, out)

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
        return self.kernels.rope_and_cache(
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
        return self.kernels.recurrent.short_conv(x, weight, bias, state, _steps(batch), silu=silu)

    def delta_rule(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: AttentionBatch
    ) -> Tensor:
        return self.kernels.recurrent.delta_rule(qkv, decay, beta, state, _steps(batch))

    def decay(self, x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        return self.kernels.recurrent.decay(x, rate, bias)

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
        return self.kernels.recurrent.selective_scan(x, dt, a, b, c, d, state, _steps(batch))

    def softplus(self, x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
        return self.kernels.recurrent.softplus(x, bias, low, high)


def _steps(batch: AttentionBatch) -> Steps:
    return Steps(batch.cu_queries, batch.seq_lens_tensor, batch.block_table)


def _fit_halves(codes: Codes) -> bool:
    """Tell whether scales and minimums are exact in float16."""
    numbers = (codes.scales,) if codes.minimums is None else (codes.scales, codes.minimums)
    return all(torch.equal(each.half().float(), each) for each in numbers)


def _layout(codes: Codes, in_halves: bool) -> CodeLayout | None:
    group = codes.group
    if codes.scales.shape[1] == 1:
        group = -(-codes.values.shape[1] // UNIT) * UNIT
    if group % UNIT:
        return None
    return CodeLayout(codes.bits, group, codes.zero, codes.minimums is not None, in_halves)


def _is_same(order: Tensor | None, other: Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)
