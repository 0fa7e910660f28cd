"""Ops in plain torch: the reference, also used where our kernels do not run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock_shard.attention.base import AttentionBackend, AttentionBatch, LayerCache, LayerSpec
from penstock_shard.ops import recurrent
from penstock_shard.ops.base import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Activation,
    Experts,
    HeadNorm,
    Matrix,
    Rope,
    Routing,
    RoutingRule,
    WeightKind,
)
from penstock_shard.ops.experts import (
    ExpertList,
    ExpertStack,
    combine,
    route,
    stack_experts,
)
from penstock_shard.ops.quantized import (
    FP8_MULTIPLE,
    INT4_GROUP,
    Fp8Experts,
    Fp8Matrix,
    Int4Matrix,
    multiplies_fp8_groups,
)

_DTYPES: dict[WeightKind, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_LARGEST_HALF = 65504.0


class DenseMatrix:
    """A weight as an ordinary tensor [N, K]."""

    has_rows = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return functional.linear(x, self.weight, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids)


class PackedHalfMatrix:
    """A float16 weight, packed by torch's fbgemm for x86, which sums in float32."""

    has_rows = False

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = 2 * weight.numel()
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product if bias is None else product.add_(bias)

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("torch does not say how it packs")


def packs_half() -> bool:
    """Tell whether this torch has packed float16 products for this CPU."""
    return "fbgemm" in torch.backends.quantized.supported_engines


class TorchOps:
    """Ops in plain torch. float32 activations with float16 weights need `packs_half`."""

    exact = False

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        weights: WeightKind,
        backend: AttentionBackend,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.weights = weights
        self.backend = backend

    @property
    def keeps_tensors(self) -> bool:
        return _DTYPES.get(self.weights) is self.dtype

    @property
    def dense_head(self) -> bool:
        return self.weights in ("fp8", "int4")

    def look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        return table.index_select(0, ids).to(self.dtype)

    @property
    def pack_codes(self) -> None:
        """Return None, because these products do not take codes."""

    def pack(self, parts: Sequence[Tensor], *, exact: bool = False) -> Matrix:
        if exact or self.keeps_tensors:
            if len(parts) == 1:
                # Kernels need contiguous rows, but rows from codes are not contiguous.
                rows = parts[0].to(self.device, self.dtype, copy=True)
                return DenseMatrix(rows.contiguous())
            return DenseMatrix(torch.cat([part.to(self.device, self.dtype) for part in parts]))
        if self.weights in ("fp8", "int4"):
            return self._rounded(parts)
        weight = torch.cat([part.float() for part in parts])
        worst = float(weight.abs().amax())
        # `worst > ...` would let a NaN pass.
        if not worst <= _LARGEST_HALF:
            raise ValueError(f"has the value {worst:g}; float16 ends at {_LARGEST_HALF:g}")
        return PackedHalfMatrix(weight)

    def _rounded(self, parts: Sequence[Tensor]) -> Matrix:
        """Return a quantized matrix if its sizes allow it, else a matrix as precise as
        activations.
        """
        if self.weights == "fp8" and _fits_fp8(parts):
            return Fp8Matrix(parts, self.device)
        if self.weights == "int4" and parts[0].shape[1] % INT4_GROUP == 0:
            return Int4Matrix(parts, self.device)
        return self.pack(parts, exact=True)

    def pack_experts(
        self, experts: Iterable[Sequence[Tensor]], count: int, *, exact: bool = False
    ) -> Experts:
        if exact or self.keeps_tensors:
            return ExpertStack(stack_experts(experts, count, self.device, self.dtype))
        if self.weights != "fp8" or not multiplies_fp8_groups(self.device):
            return ExpertList(self.pack(parts) for parts in experts)
        experts = iter(experts)
        first = next(experts)
        if not _fits_fp8(first):
            return ExpertList(self.pack(parts) for parts in itertools.chain([first], experts))
        return Fp8Experts(itertools.chain([first], experts), count, self.device)

    def route(self, logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
        return route(logits, rule, bias)

    def combine(self, rows: Tensor, routing: Routing, out: Tensor | None = None) -> Tensor:
        return combine(rows, routing)

    def set_threads(self, count: int) -> None:
        if self.device.type == "cpu":
            torch.set_num_threads(count)

    def scratch(self, *shape: int) -> None:
        return None

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        out: Tensor | None = None,
    ) -> Tensor:
        return _rms_norm(x if residual is None else residual.add_(x), weight, eps, offset)

    def gated_activation(
        self, gate_up: Tensor, kind: Activation, out: Tensor | None = None
    ) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if kind == "silu":
            return functional.silu(gate).mul_(up)
        if kind == "sigmoid":
            return torch.sigmoid(gate).mul_(up)
        if kind == "clamped_swiglu":
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return torch.sigmoid(SWIGLU_ALPHA * gate).mul_(gate).mul_(up + 1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

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
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        num_kept = layer.num_heads + layer.num_kv_heads
        query, key, value = torch.tensor_split(heads, (layer.num_heads, num_kept), dim=1)
        if norm is not None:
            query = _rms_norm(query, norm.query_weight, norm.eps, norm.offset)
            key = _rms_norm(key, norm.key_weight, norm.eps, norm.offset)
        cos = rope.cos[positions].unsqueeze(1)
        sin = rope.sin[positions].unsqueeze(1)
        self.backend.write(cache, _rotate(key, cos, sin), value, slots)
        return _rotate(query, cos, sin)

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
        return recurrent.short_conv(x, weight, bias, state, batch, silu=silu)

    def delta_rule(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: AttentionBatch
    ) -> Tensor:
        return recurrent.delta_rule(qkv, decay, beta, state, batch)

    def decay(self, x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        return recurrent.decay(x, rate, bias)

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
        return recurrent.selective_scan(x, dt, a, b, c, d, state, batch)

    def softplus(self, x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
        return recurrent.softplus(x, bias, low, high)


def _fits_fp8(parts: Sequence[Tensor]) -> bool:
    rows, columns = sum(len(part) for part in parts), parts[0].shape[1]
    return rows % FP8_MULTIPLE == columns % FP8_MULTIPLE == 0


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * (weight.float() + offset)).to(x.dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_dim elements of heads [T, H, D], with cos and sin [T, 1, rotary_dim /
    2].
    """
    half = cos.shape[-1]
    wide = heads.float()
    first, second, rest = torch.tensor_split(wide, (half, 2 * half), dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(heads.dtype)
