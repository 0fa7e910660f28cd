"""Whether our Triton kernels run on a device and compute there what plain torch does.

Attention is checked in `choose_attention.py`, once a model's layers are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, LayerSpec, make_paged_pair
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.errors import device_failures, first_line
from penstock_shard.ops.base import (
    Activation,
    Experts,
    HeadNorm,
    Ops,
    Rope,
    RoutingRule,
    WeightKind,
)
from penstock_shard.ops.quantized import multiplies_fp8, round_in_torch
from penstock_shard.ops.torch_ops import TorchOps

# Largest difference, relative to 1 + |expected|: so absolute near 0, as values are about 1.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# One step of e4m3: half way between two values, the last bit of a quotient decides the rounding.
_FP8_STEP = 2.0**-3
_LAYER = LayerSpec(0, 4, 2, 16, 16, 0.25)
_TOKENS = 3
# Channels of a convolution, and tokens of a sequence that begins: more than a program computes.
_CHANNELS, _BEGUN = 24, 34
# N and K of products: neither is a multiple of a tile's size.
_COLUMNS, _DEPTH = 40, 72
# Rows of exact products: one for each of the two tile heights.
_ROWS = (_TOKENS, 70)
# Experts, and tokens with two experts each: one count for each of the two tile heights.
_EXPERTS, _ROUTED = 3, (2, 50)
# Logits in a row to draw from: more than a kernel reads at once.
_VOCABULARY = 5000

# Kinds of kernels, which can be checked one by one.
KERNELS = ("rows", "rotation", "states", "products", "rounding", "draws")

# A kernel's name for messages, its result, and the largest difference; None: no difference.
_Result = tuple[str, Tensor, float | None]


def triton_fault(
    device: torch.device,
    dtype: torch.dtype,
    weights: WeightKind,
    *,
    exact: bool,
    kernels: Sequence[str] = KERNELS,
) -> str | None:
    """The fault of the kernels that such ops use on this device; None if they are right."""
    try:
        from penstock_shard.ops.triton_ops import TritonOps

        ops = TritonOps(device, dtype, weights, SdpaBackend(), exact=exact)
        ours = list(_results(ops, exact=exact, in_torch=False, kernels=kernels))
    except device_failures() as error:
        return f"Triton fails on {device} with {type(error).__name__}: {first_line(error)}"
    plain = TorchOps(device, dtype, weights, SdpaBackend())
    theirs = _results(plain, exact=exact, in_torch=True, kernels=kernels)
    for (name, got, tolerance), (_, want, _) in zip(ours, theirs, strict=True):
        errors = (got.double() - want.double()).abs() / (1 + want.double().abs())
        worst = float(errors.amax())
        # Not `worst > ...`: a NaN must not pass.
        if not worst <= (tolerance or 0.0):
            return f"Triton's {name} differs from torch's by {worst:.2g} on {device}"
    return None


class _Noise:
    """Random numbers on a device, the same from every instance."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device, self._dtype = device, dtype

    def wide(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device)

    def rows(self, count: int, size: int) -> Tensor:
        return self.wide(count, size).to(self._dtype)


@torch.inference_mode()
def _results(
    ops: Ops, *, exact: bool, in_torch: bool, kernels: Sequence[str] = KERNELS
) -> Iterator[_Result]:
    """Results of these kernels, or of torch in their place, for the same random numbers."""
    noise = _Noise(ops.device, ops.dtype)
    tolerance = _TOLERANCE[ops.dtype]
    # Each is computed when it is asked for.
    of_layers = {
        "rows": _of_rows(ops, noise),
        "rotation": _of_rotation(ops, noise),
        "states": _of_states(ops, noise),
        "products": _of_products(ops, noise, exact),
    }
    for kind in kernels:
        for name, tensor in of_layers.get(kind, ()):
            yield name, tensor, tolerance
    if "rounding" in kernels and multiplies_fp8(ops.device):
        values, scales = _rounding(in_torch)(noise.rows(_TOKENS, _DEPTH))
        yield "rounding", values.float() * scales, _FP8_STEP
    if "draws" in kernels:
        yield "drawing", _drawn(noise, ops.device, in_torch), None
        yield "drawing by id", _drawn_by_id(noise, ops, in_torch), None


def _of_rows(ops: Ops, noise: _Noise) -> Iterator[tuple[str, Tensor]]:
    stream = noise.rows(_TOKENS, 48)
    yield "norm", ops.add_rms_norm(noise.rows(_TOKENS, 48), stream, noise.wide(48), 1e-5, 1.0)
    yield "sum", stream
    for kind in get_args(Activation):
        yield kind, ops.gated_activation(noise.rows(_TOKENS, 96), kind)


def _of_rotation(ops: Ops, noise: _Noise) -> Iterator[tuple[str, Tensor]]:
    cache = make_paged_pair(_LAYER, 1, 16, ops.dtype, ops.device)
    for part in cache:
        part.zero_()
    angles = noise.wide(_TOKENS, 8)
    heads = ops.rope_and_cache(
        noise.rows(_TOKENS, 128),
        _LAYER,
        cache,
        torch.arange(_TOKENS, device=ops.device),
        torch.tensor([9, 2, 5], device=ops.device),
        Rope(angles.cos(), angles.sin()),
        HeadNorm(noise.wide(16), noise.wide(16), 1e-6, 1.0),
    )
    yield "rotation", heads
    for name, part in zip(("keys", "values"), cache, strict=True):
        yield name, part


def _of_states(ops: Ops, noise: _Noise) -> Iterator[tuple[str, Tensor]]:
    """Of a sequence that goes on with a token, and of one that begins with several."""
    total, batch = 1 + _BEGUN, _goes_on_and_begins(ops.device)
    inputs, matrices = noise.wide(2, 3, _CHANNELS), noise.wide(2, 2, 8, 8)
    x, weight, bias = noise.rows(total, _CHANNELS), noise.wide(4, _CHANNELS), noise.wide(_CHANNELS)
    yield "convolution", ops.short_conv(x, weight, bias, inputs, batch, silu=True)
    yield "state of the convolution", inputs
    decay, beta = noise.wide(total, 2).sigmoid(), noise.wide(total, 2).sigmoid()
    # Queries and keys of one head, values of two.
    yield "delta rule", ops.delta_rule(noise.rows(total, 4 * 8), decay, beta, matrices, batch)
    # A copy: what follows updates it once more.
    yield "state of the delta rule", matrices.clone()
    b, c = (noise.rows(total, 8).view(total, 1, 8) for _ in range(2))
    x, rates = noise.rows(total, 2 * 8).view(total, 2, 8), -noise.wide(2, 8).abs()
    scanned = ops.selective_scan(x, decay, rates, b, c, noise.wide(2), matrices, batch)
    yield "selective scan", scanned
    yield "state of the scan", matrices


def _goes_on_and_begins(device: torch.device) -> AttentionBatch:
    def on_device(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    cu_queries, counts, lengths = on_device(0, 1, 1 + _BEGUN), (1, _BEGUN), (9, _BEGUN)
    return AttentionBatch(
        query_lens=counts,
        seq_lens=lengths,
        num_decodes=1,
        block_size=16,
        slots=torch.zeros(1 + _BEGUN, dtype=torch.int64, device=device),
        cu_queries=cu_queries,
        cu_keys=on_device(0, 9, 9 + _BEGUN),
        seq_lens_tensor=on_device(*lengths),
        block_table=on_device(1, 0).view(2, 1),
    )


def _of_products(ops: Ops, noise: _Noise, exact: bool) -> Iterator[tuple[str, Tensor]]:
    """Products of matrices only if exact: otherwise torch computes them, not our kernels."""
    if exact:
        matrix = ops.pack([noise.wide(_COLUMNS, _DEPTH)])
        for count in _ROWS:
            rows = noise.rows(count, _DEPTH)
            yield f"product of {count} rows", matrix.linear(rows, noise.rows(1, _COLUMNS)[0])
    experts: Experts | None = None
    if ops.keeps_tensors:
        parts = ([noise.wide(_COLUMNS, _DEPTH)] for _ in range(_EXPERTS))
        experts = ops.pack_experts(parts, _EXPERTS)
    for tokens in _ROUTED:
        routing = ops.route(noise.wide(tokens, _EXPERTS), RoutingRule(2))
        if experts is not None:
            product = experts.grouped(noise.rows(2 * tokens, _DEPTH), routing.offsets)
            yield f"product of experts of {2 * tokens} rows", product
        yield "sum of experts", ops.combine(noise.rows(2 * tokens, _COLUMNS), routing)


def _rounding(in_torch: bool) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    if in_torch:
        return round_in_torch
    from penstock_shard.kernels.triton_quantize import round_rows

    return round_rows


def _drawn(noise: _Noise, device: torch.device, in_torch: bool) -> Tensor:
    """Tokens drawn for three rows; the second is settled, and the third has a floor."""
    # Rounded so that there are many ties.
    scaled = (noise.wide(3, _VOCABULARY).abs() * -16).round() / 16
    weights = (scaled.exp() * 2.0**42).long()
    goal = weights.sum(dim=1, keepdim=True) * 15 // 16
    floor = torch.zeros_like(goal)
    floor[2] = weights[2].amax() // 4
    uniform = torch.full_like(goal, 0.9, dtype=torch.float64)
    settled = torch.zeros_like(goal, dtype=torch.bool)
    settled[1] = True
    tokens = torch.full((3,), -1, device=device)
    if in_torch:
        drawn = _drawn_by_sorting(scaled, weights, goal, floor, uniform)
        return torch.where(settled.squeeze(1), tokens, drawn)
    from penstock_shard.kernels.triton_draw import draw_unsettled

    draw_unsettled(scaled, weights, goal, floor, uniform, settled, tokens)
    return tokens


def _drawn_by_id(noise: _Noise, ops: Ops, in_torch: bool) -> Tensor:
    """Tokens drawn for rows that are not in the order of the logits; two rows have a floor that
    only their largest logits reach. Few logits have any weight, so that no token depends on the
    last bits of a weight.
    """
    logits = torch.full((4, _VOCABULARY), float("-inf"), dtype=ops.dtype, device=ops.device)
    logits[:, :: _VOCABULARY // 9] = noise.rows(4, 10)
    best = logits.amax(dim=1)
    one, rows = 2.0**42, [2, 0, 3, 1]
    settings = torch.tensor(
        [[2, 1.0, 0, 0.1], [0, 0.5, 0, 0.9], [3, 4.0, one, 0.02], [1, 4.0, one, 0.98]],
        dtype=torch.float64,
        device=ops.device,
    )
    if not in_torch:
        from penstock_shard.kernels.triton_draw import draw_by_id

        return draw_by_id(logits, best, settings, one)
    _, temperature, floor, share = settings.unsqueeze(2).unbind(1)
    scaled = (logits[rows].float() - best[rows].float().unsqueeze(1)) / temperature.float()
    weights = (scaled.exp() * one).long()
    cumulative = (weights * (weights >= floor)).cumsum(1)
    goal = (share * cumulative[:, -1:]).long()
    return torch.searchsorted(cumulative, goal, right=True).squeeze(1)


def _drawn_by_sorting(
    scaled: Tensor, weights: Tensor, goal: Tensor, floor: Tensor, uniform: Tensor
) -> Tensor:
    """The tokens that `draw_unsettled` should draw, int64 [n]."""
    order = scaled.sort(dim=1, descending=True, stable=True).indices
    ordered = weights.gather(1, order)
    cumulative = ordered.cumsum(1)
    above = (ordered >= floor).sum(dim=1, keepdim=True)
    count = torch.minimum(torch.searchsorted(cumulative, goal) + 1, above)
    kept = cumulative.gather(1, count - 1)
    place = torch.searchsorted(cumulative, (uniform * kept).long(), right=True)
    return order.gather(1, place).squeeze(1)
