"""Ops over our Triton kernels and torch's products: about ten kernels for each layer.

They were checked only in Triton's interpreter and never ran on hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBackend, AttentionBatch, LayerCache, LayerSpec
from penstock_shard.kernels import triton_layers, triton_recurrent
from penstock_shard.kernels.triton_matmul import fixed_linear, grouped_linear
from penstock_shard.kernels.triton_quantize import Fp8Rows, empty_fp8_rows
from penstock_shard.kernels.triton_route import fits, route_tokens
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
from penstock_shard.ops.experts import ExpertStack, stack_experts
from penstock_shard.ops.quantized import FP8_MULTIPLE, RoundedTensor
from penstock_shard.ops.torch_ops import DenseMatrix, TorchOps


class FixedMatrix(DenseMatrix):
    """A weight as an ordinary tensor [N, K]; a row's bits depend only on that row."""

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return fixed_linear(x, self.weight, bias, out)


class GroupedExperts(ExpertStack):
    """Experts in one ordinary tensor [E, N, K], all computed in one launch."""

    capturable = True

    def __init__(self, weights: Tensor, *, exact: bool) -> None:
        super().__init__(weights)
        self._exact = exact

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        return grouped_linear(x, self.weights, offsets, exact=self._exact)


class TritonOps(TorchOps):
    """Ops over our Triton kernels. If `exact`, products use tiles of one shape; with an exact
    backend, a token's bits are then the same in any step.

    There is no scratch memory, because a CUDA graph must write to its own pool's memory.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        weights: WeightKind,
        backend: AttentionBackend,
        *,
        exact: bool = False,
    ) -> None:
        super().__init__(device, dtype, weights, backend)
        self.exact = exact

    def pack(self, parts: Sequence[Tensor], *, exact: bool = False) -> Matrix:
        matrix = super().pack(parts, exact=exact)
        if self.exact and isinstance(matrix, DenseMatrix):
            return FixedMatrix(matrix.weight)
        return matrix

    def pack_experts(
        self, experts: Iterable[Sequence[Tensor]], count: int, *, exact: bool = False
    ) -> Experts:
        if not (exact or self.keeps_tensors):
            return super().pack_experts(experts, count)
        stack = stack_experts(experts, count, self.device, self.dtype)
        return GroupedExperts(stack, exact=self.exact)

    def route(self, logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
        if not fits(logits.shape[1], rule.groups):
            return super().route(logits, rule, bias)
        fields = route_tokens(
            logits,
            bias,
            top_k=rule.top_k,
            softmax=rule.scores == "softmax",
            normalised=rule.is_normalised,
            scale=rule.scale,
            eps=rule.eps,
            groups=rule.groups,
            top_groups=rule.top_groups,
        )
        return Routing(*fields)

    def combine(self, rows: Tensor, routing: Routing, out: Tensor | None = None) -> Tensor:
        return triton_layers.combine_rows(rows, routing.rows, routing.weights, out)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        out: Tensor | None = None,
    ) -> Tensor:
        rounded = self._fp8_rows(len(x), x.shape[1], out)
        normed = triton_layers.add_rms_norm(x, residual, weight, eps, offset, out, rounded=rounded)
        return normed if rounded is None else RoundedTensor.of(normed, rounded)

    def gated_activation(
        self, gate_up: Tensor, kind: Activation, out: Tensor | None = None
    ) -> Tensor:
        if kind not in ("silu", "gelu_tanh"):
            return super().gated_activation(gate_up, kind, out)
        gelu = kind == "gelu_tanh"
        rounded = self._fp8_rows(len(gate_up), gate_up.shape[1] // 2, out)
        active = triton_layers.gated_activation(gate_up, gelu=gelu, out=out, rounded=rounded)
        return active if rounded is None else RoundedTensor.of(active, rounded)

    def _fp8_rows(self, tokens: int, columns: int, out: Tensor | None) -> Fp8Rows | None:
        """Return memory for the result in fp8; None if no fp8 product can follow, or if `out` is
        given, because `out` may be changed in place.
        """
        if self.weights != "fp8" or columns % FP8_MULTIPLE or out is not None:
            return None
        return empty_fp8_rows(tokens, columns, self.device)

    def rope_and_cache(
        self,
        qkv: Tensor,
        layer: LayerSpec,
        cache: LayerCache,
        positions: Tensor,
        slots: Tensor,
        rope: Rope,
        norm: HeadNorm | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if not triton_layers.is_contiguous_pair(cache):
            return super().rope_and_cache(qkv, layer, cache, positions, slots, rope, norm, out)
        norms = None
        if norm is not None:
            norms = (norm.query_weight, norm.key_weight, norm.eps, norm.offset)
        return triton_layers.rope_and_cache(
            qkv, layer.num_heads, cache, positions, slots, (rope.cos, rope.sin), norms, out
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
        return triton_recurrent.short_conv(x, weight, bias, state, _step(batch), silu=silu)

    def delta_rule(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: AttentionBatch
    ) -> Tensor:
        return triton_recurrent.delta_rule(qkv, decay, beta, state, _step(batch))

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
        return triton_recurrent.selective_scan(x, dt, a, b, c, d, state, _step(batch))


def _step(batch: AttentionBatch) -> triton_recurrent.Step:
    return triton_recurrent.Step(
        batch.cu_queries, batch.seq_lens_tensor, batch.block_table, max(batch.query_lens)
    )
