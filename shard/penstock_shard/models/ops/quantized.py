"""Matrices of 8 and 4 bits: rounded at load, multiplied by what torch and torchao have for them.

fp8 is e4m3 (Micikevicius et al., 2022) with a scale for each output row; activations are rounded
alike, with a scale for each token. Where the device has no such products they are emulated with
the same rounding: products of two e4m3 numbers are exact in float32, sums are not. int4 is of
weights alone, by torchao, in groups of 128.

Knows tensors. Knows nothing of models or files.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock_shard.models.triton_here import fault_on

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Of a CUDA device, for products of fp8, and of torch's kernel for 4 bits.
_FP8_CAPABILITY = (8, 9)
_INT4_CAPABILITY = (8, 0)
# What both sizes of an fp8 matrix must be multiples of for `torch._scaled_mm`.
FP8_MULTIPLE = 16
INT4_GROUP = 128
# Elements of a weight that are rounded at once: on the way they take four times this in float32.
_PIECE = 1 << 24
# Columns that tell whether a row is worth a closer look.
_GLANCE = 64
# Rows without a value this large count as zero: their scales would lose bits.
_SMALLEST = torch.finfo(torch.float32).tiny * FP8_MAX
# Relative error of a product that was rounded to float32 once, and of a scale divided out of it.
_NEARLY = 2.0**-22


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has products of fp8."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def multiplies_fp8_groups(device: torch.device) -> bool:
    """Whether the device has products of fp8 for several experts at once."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def captures_fp8(device: torch.device) -> bool:
    """Whether its products of fp8 may run on any stream, and so be part of a CUDA graph.

    On compute capability 8.9 torch launched them on the default one, before 2.12: elsewhere they
    may never end (pytorch issue 177651).
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _FP8_CAPABILITY:
        return True
    return torch.__version__ >= "2.12"


def multiplies_int4(device: torch.device) -> bool:
    """Whether the device has products with weights of 4 bits."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _INT4_CAPABILITY


def has_torchao() -> bool:
    """Whether int4 matrices can be made here."""
    return importlib.util.find_spec("torchao") is not None


class Fp8Matrix:
    """A weight [N, K] in e4m3 with a scale for each row."""

    has_rows = False

    def __init__(self, parts: Sequence[Tensor], device: torch.device) -> None:
        """The parts lie below one another. Raises ValueError for values that are no numbers."""
        self.out_features = sum(len(part) for part in parts)
        self.in_features = parts[0].shape[1]
        shape = (self.out_features, self.in_features)
        self.values = torch.empty(shape, dtype=FP8, device=device)
        self.scales = torch.empty(1, self.out_features, device=device)
        start = 0
        for piece in _pieces(parts):
            values, scales = round_weight(piece.to(device, torch.float32))
            end = start + len(piece)
            # As bytes: not all devices copy between places in fp8.
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
        """Raises ValueError for values that are no numbers."""
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
    """A weight [N, K] in 4 bits, a scale and a zero point for each group, as torchao packs it."""

    has_rows = False

    def __init__(self, parts: Sequence[Tensor], device: torch.device) -> None:
        from torchao.quantization import Int4WeightOnlyConfig, quantize_

        weight = torch.cat([part.to(device, torch.bfloat16) for part in parts])
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("has values that are no numbers")
        self.out_features, self.in_features = weight.shape
        holder = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        holder.weight = nn.Parameter(weight, requires_grad=False)
        # The packing of tensor cores, whose products come with torch itself.
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
    """x [T, K] -> e4m3 [T, K] and what each token's are times, float32 [T, 1]."""
    if x.device.type == "cuda" and fault_on("cuda") is None:
        return _rounding_kernel()(x)
    return round_in_torch(x)


def round_in_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `round_activations` gives, without a kernel."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp_(min=_SMALLEST)
    # Not by a number: by those CUDA's torch does not divide, it multiplies by what they invert to.
    scales /= torch.full_like(scales, FP8_MAX)
    # Clamped, as a cast of what is larger gives NaN in some releases.
    return (wide / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight float32 [N, K] -> e4m3 [N, K] and what each row's are times, float32 [N].

    A row that is e4m3 times a number already, as those of fp8 checkpoints are, is so again: all its
    values stay the same bit for bit. Others get the scale that makes their largest value 448.
    Raises ValueError for values that are no numbers.
    """
    largest = weight.abs().amax(dim=1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("has values that are no numbers")
    scales = largest.clamp(min=_SMALLEST) / FP8_MAX
    for scale in _scales_kept(weight, largest):
        scales = torch.where(torch.isnan(scale), scales, scale)
    return _rounded(weight, scales), scales


def _scales_kept(weight: Tensor, largest: Tensor) -> Iterator[Tensor]:
    """Scales [N] with which rows lose nothing; NaN for rows of which that is not known.

    The largest value is some e4m3 number times the scale, and up to powers of two, which make no
    difference, there are eight of these. So eight scales are tried, and as a quotient may be off by
    a bit, their neighbours.
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
    """That of the scale [n] and its two neighbours which gives the rows exactly; NaN if none."""
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
    # Of any number of tokens: on compute capability 9 this is cuBLASLt's, from CUDA 12.9 on. Where
    # it is CUTLASS's, that reads scales past their end unless tokens are a multiple of 256 (pytorch
    # issue 133334), so torch first copies them to where there is room.
    # Fast accumulation keeps 14 bits of a sum.
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
    """One kernel for what takes plain torch six."""
    # Here: Triton is not everywhere, and takes long to import.
    from penstock_shard.models.kernels.triton_quantize import round_rows

    return round_rows
