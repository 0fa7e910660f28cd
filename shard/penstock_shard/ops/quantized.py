"""fp8 and int4 matrices: quantized at load, multiplied by kernels of torch and torchao.

fp8 is e4m3 (Micikevicius et al., 2022) with a scale for each output row; activations are rounded
too, with a scale for each token. A device without fp8 products emulates them in float32, where
products of two e4m3 numbers are exact, but sums are not. int4 quantizes only weights, by torchao,
in groups of 128.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock_shard.device.triton_support import fault_on

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# The lowest compute capabilities with fp8 products and with torch's int4 kernel.
_FP8_CAPABILITY = (8, 9)
_INT4_CAPABILITY = (8, 0)
# `torch._scaled_mm` needs N and K that are multiples of this.
FP8_MULTIPLE = 16
INT4_GROUP = 128
# Elements of a weight that are rounded at once, in float32.
_PIECE = 1 << 24
# A scale is tried on this many columns before whole rows are compared.
_GLANCE = 64
# The lower bound for a row's largest value: below it, the scale would be subnormal and lose bits.
_SMALLEST = torch.finfo(torch.float32).tiny * FP8_MAX
# Bound of two relative errors: of a quotient by a scale, and of a product rounded to float32.
_NEARLY = 2.0**-22


def multiplies_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def multiplies_fp8_groups(device: torch.device) -> bool:
    """Tell whether the device has fp8 products of several experts in one launch."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def captures_fp8(device: torch.device) -> bool:
    """Tell whether a CUDA graph may capture the device's fp8 products.

    On compute capability 8.9 with torch before 2.12, these products may never end unless they run
    on the default stream (pytorch issue 177651).
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _FP8_CAPABILITY:
        return True
    return torch.__version__ >= "2.12"


def multiplies_int4(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _INT4_CAPABILITY


def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


class RoundedTensor(Tensor):
    """Activations [T, K] with the result of `round_activations`, computed in the same launch.

    They must not be changed in place.
    """

    rounded: tuple[Tensor, Tensor]
    # torch operations return ordinary tensors, as for parameters.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, x: Tensor, rounded: tuple[Tensor, Tensor]) -> RoundedTensor:
        carrier = x.as_subclass(cls)
        carrier.rounded = rounded
        return carrier


class Fp8Matrix:
    """A weight [N, K] in e4m3 with a scale for each row."""

    has_rows = False

    def __init__(self, parts: Sequence[Tensor], device: torch.device) -> None:
        """Stack `parts` into one matrix. Raises ValueError for NaN or infinity."""
        self.out_features = sum(len(part) for part in parts)
        self.in_features = parts[0].shape[1]
        shape = (self.out_features, self.in_features)
        self.values = torch.empty(shape, dtype=FP8, device=device)
        self.scales = torch.empty(1, self.out_features, device=device)
        start = 0
        for piece in _pieces(parts):
            values, scales = round_weight(piece.to(device, torch.float32))
            end = start + len(piece)
            # Copy bytes, because not all devices can copy fp8.
            self.values[start:end].view(torch.uint8).copy_(values.view(torch.uint8))
            self.scales[0, start:end] = scales
            start = end
        self.nbytes = self.values.nbytes + self.scales.nbytes
        self._multiply = _scaled_mm if multiplies_fp8(device) else _emulated_mm

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        values, scales = round_activations(x)
        return self._multiply(values, scales, self.values, self.scales, bias, x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("embeddings stay as precise as activations")


class Fp8Experts:
    """Weights [E, N, K] of experts in e4m3 with a scale for each row, multiplied in one launch."""

    capturable = True

    def __init__(
        self, experts: Iterable[Sequence[Tensor]], count: int, device: torch.device
    ) -> None:
        """Raises ValueError for NaN or infinity."""
        for index, parts in enumerate(experts):
            matrix = Fp8Matrix(parts, device)
            if index == 0:
                shape = (count, matrix.out_features, matrix.in_features)
                self.values = torch.empty(shape, dtype=FP8, device=device)
                self.scales = torch.empty(shape[:2], device=device)
            self.values[index].view(torch.uint8).copy_(matrix.values.view(torch.uint8))
            self.scales[index] = matrix.scales[0]
        _, self.out_features, self.in_features = self.values.shape
        self.nbytes = self.values.nbytes + self.scales.nbytes

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        values, scales = round_activations(x)
        product: Tensor = torch._scaled_grouped_mm(
            values,
            self.values.transpose(1, 2),
            scales.view(-1),
            self.scales,
            offs=offsets[1:],
            out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )
        return product


class Int4Matrix:
    """An int4 weight [N, K], with a scale and a zero point for each group, packed by torchao."""

    has_rows = False

    def __init__(self, parts: Sequence[Tensor], device: torch.device) -> None:
        from torchao.quantization import Int4WeightOnlyConfig, quantize_

        weight = torch.cat([part.to(device, torch.bfloat16) for part in parts])
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("has values that are no numbers")
        self.out_features, self.in_features = weight.shape
        holder = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        holder.weight = nn.Parameter(weight, requires_grad=False)
        # torch itself has the kernel for this packing.
        packing = Int4WeightOnlyConfig(
            group_size=INT4_GROUP,
            int4_packing_format="tile_packed_to_4d",
            set_inductor_config=False,
        )
        quantize_(holder, packing)
        self._weight: Tensor = holder.weight
        groups = weight.numel() // INT4_GROUP
        self.nbytes = weight.numel() // 2 + groups * 2 * weight.itemsize

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return functional.linear(x, self._weight, bias)

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("embeddings stay as precise as activations")


def round_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, K] to e4m3 [T, K] and a scale for each token, float32 [T, 1]."""
    if isinstance(x, RoundedTensor):
        return x.rounded
    if x.device.type == "cuda" and fault_on("cuda") is None:
        return _rounding_kernel()(x)
    return round_in_torch(x)


def round_in_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `round_activations` in plain torch."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp_(min=_SMALLEST)
    # Divide by a tensor, because torch on CUDA replaces division by a number by a multiplication.
    scales /= torch.full_like(scales, FP8_MAX)
    # In some torch releases, the cast turns larger values into NaN.
    return (wide / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight float32 [N, K] to e4m3 [N, K] and a scale for each row, float32 [N].

    Rows that already are e4m3 numbers times one scale, as in fp8 checkpoints, stay exact. Other
    rows get the scale that maps their largest value to 448. Raises ValueError for NaN or infinity.
    """
    largest = weight.abs().amax(dim=1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("has values that are no numbers")
    scales = largest.clamp(min=_SMALLEST) / FP8_MAX
    for scale in _scales_kept(weight, largest):
        scales = torch.where(torch.isnan(scale), scales, scale)
    return _rounded(weight, scales), scales


def _scales_kept(weight: Tensor, largest: Tensor) -> Iterator[Tensor]:
    """Yield scales [N] that represent rows exactly; NaN for other rows.

    A row's largest value is an e4m3 number times the scale. Apart from powers of two, which make no
    difference, there are eight e4m3 numbers. Each gives a scale; its neighbors are tried too,
    because the quotient may be off by one bit.
    """
    nan = torch.full_like(largest, torch.nan)
    open_rows = largest > _SMALLEST
    glance = weight[:, :_GLANCE]
    for top in (448.0, 256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 240.0):
        scale = largest / top
        error = (_rounded(glance, scale).float() * scale.unsqueeze(1) - glance).abs()
        likely = open_rows & (error <= glance.abs() * _NEARLY).all(dim=1)
        rows = likely.nonzero().squeeze(1)
        if not len(rows):
            continue
        found = nan.clone()
        found[rows] = _exact_scale(weight[rows], scale[rows])
        open_rows = open_rows & torch.isnan(found)
        yield found


def _exact_scale(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the scale, or a neighbor of it, that represents the row exactly; NaN if none does."""
    found = torch.full_like(scale, torch.nan)
    for toward in (torch.inf, -torch.inf, None):
        near = scale if toward is None else scale.nextafter(torch.full_like(scale, toward))
        same = (_rounded(weight, near).float() * near.unsqueeze(1) == weight).all(dim=1)
        found = torch.where(same, near, found)
    return found


def _rounded(weight: Tensor, scales: Tensor) -> Tensor:
    return (weight / scales.unsqueeze(1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _pieces(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    for part in parts:
        rows = max(1, _PIECE // part.shape[1])
        for start in range(0, len(part), rows):
            yield part[start : start + rows]


def _scaled_mm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    # `_scaled_mm` takes any number of tokens: where CUTLASS would read past the end of the scales
    # (pytorch issue 133334), torch copies them to a larger buffer. Fast accumulation would keep
    # only 14 bits of a sum.
    product: Tensor = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scales,
        scale_b=scales,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=False,
    )
    return product


def _emulated_mm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    product = functional.linear(x.float(), weight.float()).mul_(x_scales).mul_(scales)
    if bias is not None:
        product += bias
    return product.to(dtype)


@functools.cache
def _rounding_kernel() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the Triton kernel: one launch instead of six in plain torch."""
    # Triton may be missing, and takes long to import.
    from penstock_shard.kernels.triton_quantize import round_rows

    return round_rows
