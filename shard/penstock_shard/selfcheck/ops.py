"""Checks that our Triton kernels run on a device and give the results of plain torch.

`choose_attention.py` checks attention, once a model's layers are known.
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
from penstock_shard.ops.quantized import multiplies_fp8, round_activations, round_in_torch
from penstock_shard.ops.torch_ops import TorchOps

# The largest difference, relative to 1 + |expected|.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# One step of e4m3: half way between two values, a quotient's last bit decides how it is rounded.
_FP8_STEP = 2.0**-3
_LAYER = LayerSpec(0, 4, 2, 16, 16, 0.25)
_TOKENS = 3
# Channels of a convolution; tokens of a sequence that begins, more than one Triton program
# computes.
_CHANNELS, _BEGUN = 24, 34
# N and K of products, which are no multiples of a tile's size.
_COLUMNS, _DEPTH = 40, 72
# Rows of exact products, one number for each tile height.
_ROWS = (_TOKENS, 70)
# The number of experts; and numbers of tokens with two experts, one for each tile height.
_EXPERTS, _ROUTED = 3, (2, 50)
# Tests of routing: the number of experts, and the rules.
_CHOSEN_FROM = 16
_RULES = (
    RoutingRule(3),
    RoutingRule(2, is_normalised=False, scale=2.5, groups=4, top_groups=2),
    RoutingRule(4, "sigmoid", scale=2.5, groups=4, top_groups=2),
)
# Logits in a row. `_VOCABULARY`: more than the kernel by id reads at once. `_RANKED`: more than the
# kernel by rank lists.
_VOCABULARY = 5000
_RANKED = 20_000

# Kinds of kernels, which can be checked separately.
KERNELS = ("rows", "rotation", "states", "products", "routing", "rounding", "draws")

# A kernel's name for messages, its result, and its tolerance; None allows no difference.
_Result = tuple[str, Tensor, float | None]


def triton_fault(
    device: torch.device,
    dtype: torch.dtype,
    weights: WeightKind,
    *,
    exact: bool,
    kernels: Sequence[str] = KERNELS,
) -> str | None:
    """Return the fault of these kernels on this device; None if they are right."""
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
        # `worst > ...` would let a NaN pass.
        if not worst <= (tolerance or 0.0):
            return f"Triton's {name} differs from torch's by {worst:.2g} on {device}"
    return None


class _Noise:
    """Random numbers, the same from every instance."""

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
    """Yield results of these kernels, or of torch instead, for the same random numbers."""
    noise = _Noise(ops.device, ops.dtype)
    tolerance = _TOLERANCE[ops.dtype]
    # Generators compute nothing unless they are used.
    of_layers = {
        "rows": _of_rows(ops, noise),
        "rotation": _of_rotation(ops, noise),
        "states": _of_states(ops, noise),
        "products": _of_products(ops, noise, exact),
    }
    for kind in kernels:
        for name, tensor in of_layers.get(kind, ()):
            yield name, tensor, tolerance
    if "routing" in kernels:
        yield from _of_routing(ops, noise)
    if "rounding" in kernels and multiplies_fp8(ops.device):
        for name, (values, scales) in _of_rounding(ops, noise, in_torch):
            yield name, values.float() * scales, _FP8_STEP
    if "draws" in kernels:
        yield "drawing by rank", _ranked(noise, ops, in_torch), None
        yield "drawing by id", _drawn_by_id(noise, ops, in_torch), None


def _of_routing(ops: Ops, noise: _Noise) -> Iterator[_Result]:
    for rule in _RULES:
        routing = ops.route(noise.wide(_TOKENS, _CHOSEN_FROM), rule, _bias(rule, noise))
        yield "weights of experts", routing.weights, _TOLERANCE[torch.float32]
        for name in ("tokens", "experts", "offsets", "rows"):
            yield f"{name} of experts", getattr(routing, name), None


def _of_rows(ops: Ops, noise: _Noise) -> Iterator[tuple[str, Tensor]]:
    update, stream = _added(noise)
    yield "norm", ops.add_rms_norm(update, stream, noise.wide(48), 1e-5, 1.0)
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
    """Yield results for a sequence that continues with one token, and one that begins."""
    total, batch = 1 + _BEGUN, _goes_on_and_begins(ops.device)
    inputs, matrices = noise.wide(2, 3, _CHANNELS), noise.wide(2, 2, 8, 8)
    x, weight, bias = noise.rows(total, _CHANNELS), noise.wide(4, _CHANNELS), noise.wide(_CHANNELS)
    yield "convolution", ops.short_conv(x, weight, bias, inputs, batch, silu=True)
    yield "state of the convolution", inputs
    decay, beta = noise.wide(total, 2).sigmoid(), noise.wide(total, 2).sigmoid()
    # Queries and keys of one head, values of two.
    yield "delta rule", ops.delta_rule(noise.rows(total, 4 * 8), decay, beta, matrices, batch)
    # A copy, because the scan updates it again.
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
    """Yield products; those of matrices only if `exact`, because torch computes the others."""
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


def _bias(rule: RoutingRule, noise: _Noise) -> Tensor | None:
    return noise.wide(_CHOSEN_FROM) if rule.scores == "sigmoid" else None


def _of_rounding(
    ops: Ops, noise: _Noise, in_torch: bool
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    yield "rounding", _rounding(in_torch)(noise.rows(_TOKENS, _DEPTH))
    if ops.weights != "fp8":
        return
    rounded = round_in_torch if in_torch else round_activations
    yield "rounded norm", rounded(ops.add_rms_norm(*_added(noise), noise.wide(48), 1e-5, 1.0))
    for kind in get_args(Activation):
        active = ops.gated_activation(noise.rows(_TOKENS, 96), kind)
        yield f"rounded {kind}", rounded(active)


def _added(noise: _Noise) -> tuple[Tensor, Tensor]:
    return noise.rows(_TOKENS, 48), noise.rows(_TOKENS, 48)


def _rounding(in_torch: bool) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    if in_torch:
        return round_in_torch
    from penstock_shard.kernels.triton_quantize import round_rows

    return round_rows


def _ranked(noise: _Noise, ops: Ops, in_torch: bool) -> Tensor:
    """Draw tokens in the order of the logits, with top-p, top-k, and all filters."""
    # Round to get many ties.
    spread = torch.tensor([0.5, 4.0, 1.0, 2.0], device=ops.device).unsqueeze(1)
    logits = ((noise.wide(4, _RANKED) * spread * 16).round() / 16).to(ops.dtype)
    best, one, rows = logits.amax(dim=1), 2.0**42, [2, 0, 3, 1]
    limits = [[0.7, 50, 1, 0], [1.0, 0, 0.9, 0], [1.5, 900, 0.8, one // 4], [0.5, 0, 0.95, 0]]
    settings = torch.tensor(
        [[row, *limit, 0.9] for row, limit in zip(rows, limits, strict=True)],
        dtype=torch.float64,
        device=ops.device,
    )
    if not in_torch:
        from penstock_shard.kernels.triton_rank import draw_ranked

        return draw_ranked(logits, best, settings, one)
    temperature = settings[:, 1:2].float()
    scaled = (logits[rows].float() - best[rows].float().unsqueeze(1)) / temperature
    return _drawn_by_sorting(scaled, settings, one)


def _drawn_by_id(noise: _Noise, ops: Ops, in_torch: bool) -> Tensor:
    """Draw tokens in the order of ids. In two rows, only the largest logits reach the floor. Few
    logits have any weight, so that no token depends on the last bits of a weight.
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


def _drawn_by_sorting(scaled: Tensor, settings: Tensor, one: float) -> Tensor:
    """Return the tokens that `draw_ranked` should draw."""
    top_k, top_p, floor, share = settings[:, 2:].unsqueeze(2).unbind(1)
    ordered, order = scaled.sort(dim=1, descending=True, stable=True)
    weights = (ordered.exp() * one).long()
    limit = torch.where(top_k > 0, top_k, scaled.shape[1]).long()
    weights[torch.arange(scaled.shape[1], device=scaled.device) >= limit] = 0
    cumulative = weights.cumsum(1)
    # A top-p of 1 may round up to more than the total.
    goal = torch.minimum((top_p * cumulative[:, -1:]).ceil().long(), cumulative[:, -1:])
    above = (weights >= floor).sum(dim=1, keepdim=True)
    count = torch.minimum(torch.searchsorted(cumulative, goal) + 1, above)
    kept = cumulative.gather(1, count - 1)
    place = torch.searchsorted(cumulative, (share * kept).long(), right=True)
    return order.gather(1, place).squeeze(1)
