"""The CPU kernels against float64 references, and their one promise: a row's bits depend on that
row alone, whatever the batch, the threads and the level.
"""

from __future__ import annotations

import itertools
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from models.driver import load
from models.model_steps import cut_logits
from support.budget import budget, in_soak, seeded
from support.kernel_levels import levels_here, only_in_soak
from torch import Tensor
from torch.nn import functional

from penstock_shard.kernels import build_cpu
from penstock_shard.kernels.cpu import ACTIVATIONS, CpuKernels, KvCache, load_kernels, make_cache
from penstock_shard.kernels.weight_layouts import WEIGHT_KINDS, CodeLayout, WeightKind

ROW_COUNTS = (1, 2, 3, 7, 64, 512)
# (n, k): odd, smaller and larger than a panel, a group and a block of k.
SHAPES = ((1, 1), (17, 33), (64, 128), (100, 300), (130, 515))
LAYOUTS = (
    CodeLayout(4, 32, 8),
    CodeLayout(4, 32, 0, has_minimums=True),
    CodeLayout(4, 128, 0, has_minimums=True),
    CodeLayout(4, 32, 8, in_halves=True),
    CodeLayout(8, 32, 128, has_minimums=True, in_halves=True),
    CodeLayout(8, 16, 32),
    CodeLayout(8, 32, 128),
    CodeLayout(8, 64, 0, has_minimums=True),
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(
    scope="module",
    params=[
        in_soak(level) if only_in_soak(level) else level for level in build_cpu.supported_levels()
    ],
)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return load_kernels(request.param)


@pytest.fixture(scope="module")
def all_levels() -> list[CpuKernels]:
    return [load_kernels(level) for level in levels_here()]


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(seeded(name).randrange(2**31))


def random_codes(
    n: int, k: int, layout: CodeLayout, random: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and minimums."""
    values = torch.randint(0, 1 << layout.bits, (n, k), dtype=torch.uint8, generator=random)
    groups = (n, -(-k // layout.group))
    scales, minimums = torch.randn(2, *groups, generator=random)
    if layout.in_halves:
        scales, minimums = scales.half().float(), minimums.half().float()
    return values, scales, minimums if layout.has_minimums else None


def meant(part: tuple[Tensor, Tensor, Tensor | None], layout: CodeLayout) -> Tensor:
    """The weight that codes stand for."""
    values, scales, minimums = part
    groups = torch.arange(values.shape[1]) // layout.group
    weight = (values.float() - layout.zero) * scales[:, groups]
    return weight if minimums is None else weight - minimums[:, groups]


def in_steps(x: Tensor, group: int) -> Tensor:
    """Activations [T, k] rounded to 127 steps a side, in groups of columns."""
    parts = x.split(group, dim=1)
    scales = [part.abs().amax(1, keepdim=True) / 127 for part in parts]
    steps = [
        (part / scale.clamp(min=1e-30)).round() for part, scale in zip(parts, scales, strict=True)
    ]
    return torch.cat([step * scale for step, scale in zip(steps, scales, strict=True)], dim=1)


def stored(weight: Tensor, kind: WeightKind) -> Tensor:
    """The values a packed weight stands for, in float64."""
    if kind == "int8":
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        return ((weight.float() / scale).round() * scale).double()
    if kind == "int4":
        return int4_stored(weight).double()
    return weight.to(getattr(torch, kind)).double()


def int4_stored(weight: Tensor) -> Tensor:
    """Return the weight as int4 stores it: of each 32 columns the largest is 8 steps below zero,
    and a step is a number in float16.
    """
    n, k = weight.shape
    groups = functional.pad(weight.float(), (0, -k % 32)).view(n, -1, 32)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (largest / -8).half().float()
    steps = torch.where(scale == 0, 0, groups / scale).round().clamp(-8, 7)
    return (steps * scale).view(n, -1)[:, :k]


def int8_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product as the kernels define it: integers summed exactly, then scaled once."""
    x_scale, w_scale = x.abs().amax(1) / 127, weight.abs().amax(1) / 127
    sums = (x / x_scale[:, None]).round().long() @ (weight / w_scale[:, None]).round().long().T
    return sums.float() * (x_scale[:, None] * w_scale)


# ---- Linear ----


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_is_the_product(kernels: CpuKernels, kind: WeightKind, n: int, k: int) -> None:
    random = generator("linear")
    weight = torch.randn(n, k, generator=random)
    bias = torch.randn(n, generator=random)
    packed = kernels.pack(weight, kind)
    for rows in (1, 3, 13, 64) if kernels.level == "portable" else ROW_COUNTS:
        x = torch.randn(rows, k, generator=random)
        expected = x.double() @ stored(weight, kind).T
        if kind == "bfloat16":
            expected = x.bfloat16().double() @ stored(weight, kind).T
        if kind in ("int8", "int4"):
            # A step of an activation is 1/127 of its largest; half of it is lost.
            slack = 0.004 * x.abs().amax() * weight.abs().sum(1).amax()
        else:
            slack = 2e-7 * k * x.abs().amax() * weight.abs().amax() + 1e-6
        for used in (None, bias):
            exact = expected if used is None else expected + used
            assert (kernels.linear(x, packed, used) - exact).abs().max() <= slack


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_sums_integers_exactly(kernels: CpuKernels, n: int, k: int) -> None:
    random = generator("int8")
    x, weight = torch.randn(7, k, generator=random), torch.randn(n, k, generator=random)
    result = kernels.linear(x, kernels.pack(weight, "int8"))
    assert torch.equal(result, int8_reference(x, weight))


def test_int8_holds_the_largest_sums(kernels: CpuKernels) -> None:
    k = 70_000
    x, weight = torch.ones(1, k), torch.ones(2, k)
    weight[1] = -1
    result = kernels.linear(x, kernels.pack(weight, "int8"))
    assert torch.equal(result, int8_reference(x, weight))


@pytest.mark.parametrize(("n", "k"), [(1, 8), (17, 40), (64, 128), (130, 520)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_codes_are_multiplied_as_what_they_stand_for(
    kernels: CpuKernels, layout: CodeLayout, n: int, k: int
) -> None:
    random = generator(f"codes {layout} {n} {k}")
    parts = [random_codes(rows, k, layout, random) for rows in (n, 19)]
    packed = kernels.pack_codes(parts, layout)
    weight = torch.cat([meant(part, layout) for part in parts])
    ids = torch.tensor([0, n + 18, n])
    assert torch.equal(kernels.rows(packed, ids), weight[ids])
    bias = torch.randn(n + 19, generator=random)
    for rows in (1, 3, 13) if kernels.level == "portable" else (1, 2, 6, 7, 64, 241):
        x = torch.randn(rows, k, generator=random)
        x[0, 3], x[-1, k // 2 :] = 50.0, 0.0
        rounded = in_steps(x, layout.group)
        slack = 1e-6 * (rounded.abs().double() @ weight.abs().double().T).amax() + 1e-6
        # Rows of the output may lie anywhere.
        out = torch.full((rows, n + 40), 7.0)
        kernels.linear(x, packed, bias, out[:, 3 : n + 22])
        exact = rounded.double() @ weight.double().T + bias
        assert (out[:, 3 : n + 22] - exact).abs().max() <= slack
        assert (out[:, :3] == 7).all()
        assert (out[:, n + 22 :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_a_table_are_looked_up_as_they_are(kernels: CpuKernels, dtype: torch.dtype) -> None:
    table = torch.randn(50, 37, generator=generator("table")).to(dtype)
    ids = torch.tensor([49, 0, 7, 7])
    assert torch.equal(kernels.look_up(table, ids), table[ids].float())
    assert kernels.look_up(table, ids[:0]).shape == (0, 37)
    for wrong in (-1, 50):
        with pytest.raises(IndexError, match="a row is outside the weight"):
            kernels.look_up(table, torch.tensor([0, wrong]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_row_times_codes_has_the_same_bits_alone_and_among_others(
    kernels: CpuKernels, layout: CodeLayout
) -> None:
    random = generator("rows")
    packed = kernels.pack_codes([random_codes(70, 296, layout, random)], layout)
    x = torch.randn(64, 296, generator=random)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(32)])
    for rows in (2, 3, 5, 6, 7, 12, 13, 32, 64):
        assert torch.equal(kernels.linear(x[:rows], packed)[:32], alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_a_linear_row_has_the_same_bits_alone_and_among_others(
    kernels: CpuKernels, kind: WeightKind
) -> None:
    random = generator("rows")
    # Several blocks of k; K and N that fill nothing.
    packed = kernels.pack(torch.randn(70, 300, generator=random), kind)
    x = torch.randn(512, 300, generator=random)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(32)])
    most = 96 if kernels.level == "portable" else 512
    for rows in (*range(2, 32), 47, 96, 241, 512):
        if rows <= most:
            result = kernels.linear(x[:rows], packed)
            assert torch.equal(result[:32], alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_of_a_packed_weight_are_its_rows(
    kernels: CpuKernels, kind: WeightKind, n: int, k: int
) -> None:
    weight = torch.randn(n, k, generator=generator(f"rows of {kind} {n} {k}"))
    ids = torch.tensor([n - 1, 0, n // 2, n - 1])
    packed = kernels.pack(weight, kind)
    assert torch.equal(kernels.rows(packed, ids).double(), stored(weight, kind)[ids])
    for bad in (-1, n):
        with pytest.raises(IndexError, match="a row is outside the weight"):
            kernels.rows(packed, torch.tensor([0, bad]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_packing_reads_any_dtype_strides_and_parts(
    kernels: CpuKernels, dtype: torch.dtype, kind: WeightKind
) -> None:
    random = generator("pack")
    weight = torch.randn(75, 90, generator=random).to(dtype)
    x = torch.randn(3, 90, generator=random)
    expected = kernels.linear(x, kernels.pack(weight.float().contiguous(), kind))
    transposed = weight.t().contiguous().t()
    every_other = torch.empty(75, 180, dtype=dtype)[:, ::2].copy_(weight)
    for same in (weight, transposed, every_other, weight.split([5, 11, 32, 27])):
        assert torch.equal(kernels.linear(x, kernels.pack(same, kind)), expected)


def test_float16_weights_are_rounded_as_torch_rounds(all_levels: list[CpuKernels]) -> None:
    tiny = torch.tensor([0.0, -0.0, 1e-8, 2.9e-8, 3e-8, 6e-8, 5.96e-8, 6.1e-5, 6.097e-5, -1e-7])
    halves = torch.arange(-31744, 31744, 7, dtype=torch.int16).view(torch.float16)
    between = halves.float() * 1.0002
    values = torch.cat((tiny, halves.float(), between[between.abs() <= 65504]))
    values = values[torch.isfinite(values)]
    for kernels in all_levels:
        packed = kernels.pack(values[:, None], "float16")
        result = kernels.linear(torch.ones(1, 1), packed)[0]
        assert torch.equal(result, values.half().float())


@pytest.mark.parametrize("value", [65505.0, -1e9, math.inf, math.nan])
def test_a_weight_beyond_float16_is_refused(kernels: CpuKernels, value: float) -> None:
    weight = torch.full((40, 70), 65504.0)
    kernels.pack(weight, "float16")
    weight[33, 65] = value
    with pytest.raises(ValueError, match=r"weight\[33, 65\] is .*; float16 holds at most 65504"):
        kernels.pack(weight, "float16")
    kernels.pack(weight, "float32")


@pytest.mark.parametrize("value", [3.4e38, -math.inf, math.nan])
def test_a_weight_beyond_bfloat16_is_refused(kernels: CpuKernels, value: float) -> None:
    weight = torch.full((40, 71), 3.38e38)
    kernels.pack(weight, "bfloat16")
    weight[33, 70] = value
    line = r"weight\[33, 70\] is .*; bfloat16 holds at most 3.38953e\+38"
    with pytest.raises(ValueError, match=line):
        kernels.pack(weight, "bfloat16")


def test_products_of_bfloat16_have_the_same_bits_on_all_levels_whatever_the_numbers(
    all_levels: list[CpuKernels],
) -> None:
    """Subnormal numbers, sums that are nearly none, overflow: not numbers that models have."""
    random = generator("bfloat16 of any size")
    for _ in range(budget(5, 200)):
        exponents = torch.randint(-70, 64, (2, 40, 24), generator=random).float()
        x, weight = torch.randn(2, 40, 24, generator=random) * 2**exponents
        # Pairs that cancel each other.
        x[:, 1::2], weight[:, 1::4] = x[:, ::2], -weight[:, ::4]
        first, *others = [
            kernels.linear(x, kernels.pack(weight, "bfloat16")) for kernels in all_levels
        ]
        for other in others:
            assert torch.equal(first.nan_to_num(7.0), other.nan_to_num(7.0))


def test_a_machine_whose_instructions_differ_is_not_served_by_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level = build_cpu.supported_levels()[-1]
    kernels = load_kernels(level)
    kernels.check_instructions()
    monkeypatch.setattr(kernels, "_differs", lambda: 1)
    with pytest.raises(build_cpu.KernelBuildError, match=f"{level} instructions give other bits"):
        kernels.check_instructions()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_weight_that_is_not_finite_is_refused_by_integers(
    kernels: CpuKernels, kind: WeightKind, value: float
) -> None:
    weight = torch.ones(40, 70)
    weight[33, 65] = value
    with pytest.raises(ValueError, match=f"not finite in row 33; {kind}"):
        kernels.pack(weight, kind)


def test_operands_that_do_not_fit_are_refused(kernels: CpuKernels) -> None:
    packed = kernels.pack(torch.ones(8, 4), "float32")
    with pytest.raises(ValueError, match=r"linear: x float32 \[2, 5\], weight \[8, 4\]"):
        kernels.linear(torch.ones(2, 5), packed)
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.linear(torch.ones(4, 2).t(), packed)
    with pytest.raises(ValueError, match=r"float64 \[2, 4\]"):
        kernels.linear(torch.ones(2, 4, dtype=torch.float64), packed)
    with pytest.raises(ValueError, match="must have 4 columns and be float32"):
        kernels.pack([torch.ones(8, 4), torch.ones(8, 5)], "float32")
    with pytest.raises(ValueError, match="at most 131072"):
        kernels.pack(torch.ones(1, 131_073), "int8")
    for group in (12, 1 << 18):
        with pytest.raises(ValueError, match=f"has {group} columns; it must be a multiple of 8"):
            kernels.pack_codes(
                [random_codes(3, 24, CodeLayout(4, group, 8))], CodeLayout(4, group, 8)
            )
    values, scales, _ = random_codes(3, 24, CodeLayout(4, 8, 8))
    for wrong in (
        (values, scales[:2], None),
        (values, scales, scales),
        (values.int(), scales, None),
    ):
        with pytest.raises(ValueError, match="scales float32"):
            kernels.pack_codes([wrong], CodeLayout(4, 8, 8))
    with pytest.raises(ValueError, match="threads is 0"):
        kernels.set_threads(0)


# ---- Norm and activation ----


@pytest.mark.parametrize("width", [1, 16, 77, 768])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_add_rms_norm(kernels: CpuKernels, width: int, offset: float) -> None:
    random = generator("norm")
    x = torch.randn(5, width, generator=random)
    residual = torch.randn(5, width, generator=random)
    weight = torch.randn(width, generator=random)
    for added in (None, residual):
        summed = x if added is None else x + added
        mean = summed.double().square().mean(-1, keepdim=True)
        expected = summed * torch.rsqrt(mean + 1e-5) * (offset + weight.double())
        kept = None if added is None else added.clone()
        result = kernels.add_rms_norm(x.clone(), kept, weight, 1e-5, offset)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
        assert kept is None or torch.equal(kept, summed)


def test_add_rms_norm_may_write_over_its_input(kernels: CpuKernels) -> None:
    x, weight = torch.randn(3, 50), torch.randn(50)
    expected = kernels.add_rms_norm(x, None, weight, 1e-5)
    assert torch.equal(kernels.add_rms_norm(x, None, weight, 1e-5, out=x), expected)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("width", [1, 16, 53])
def test_gated_activation(kernels: CpuKernels, width: int) -> None:
    random = generator("gate")
    gate_up = torch.randn(6, 2 * width, generator=random) * 10
    gate_up[:, 0] = torch.tensor([0.0, -100.0, 100.0, 1e-3, -1e-6, 88.5])
    gate, up = gate_up.double().chunk(2, dim=-1)
    silu = kernels.gated_activation(gate_up, "silu")
    torch.testing.assert_close(silu.double(), functional.silu(gate) * up, rtol=1e-6, atol=1e-6)
    gelu = kernels.gated_activation(gate_up, "gelu_tanh")
    expected = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu.double(), expected, rtol=3e-6, atol=3e-6)
    clamped = kernels.gated_activation(gate_up, "clamped_swiglu")
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(clamped.double(), expected, rtol=3e-6, atol=3e-6)


def test_what_is_not_a_number_stays_so_whatever_its_bits(kernels: CpuKernels) -> None:
    bits = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FC000FF, 0x7FFFFFFF], dtype=torch.int32)
    gate_up = torch.cat((bits.view(torch.float32), torch.ones(4)))[None]
    for kind in ACTIVATIONS:
        assert kernels.gated_activation(gate_up, kind).isnan().all()


# ---- Rotation and cache ----


def read_cache(cache: KvCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [T, Hkv, D] and values [T, Hkv, Dv] at slots, out of the layout that KvCache states."""
    assert cache.keys is not None
    block, offset = slots // cache.block_size, slots % cache.block_size
    return cache.keys[block, :, offset // 16, :, offset % 16], cache.values[block, :, offset]


def rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """heads [T, H, D] by angles [T, rotary_dim / 2]."""
    half = angles.shape[1]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    result = heads.clone()
    first, second = heads[..., :half], heads[..., half : 2 * half]
    result[..., :half] = first * cos - second * sin
    result[..., half : 2 * half] = second * cos + first * sin
    return result


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 32), (10, 6), (8, 0)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache(kernels: CpuKernels, dim: int, rotary: int, normed: bool) -> None:
    random = generator("rope")
    heads, kv_heads, rows = 6, 2, 5
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=random)
    q_norm, k_norm = torch.randn(2, dim, generator=random)
    positions = torch.tensor([7, 0, 30, 31, 2])
    slots = torch.tensor([40, 3, 16, -1, 47])
    angles = torch.rand(32, rotary // 2, generator=random) * 6
    cache = make_cache(2, 32, kv_heads, dim, dim, torch.float16)
    assert cache.keys is not None
    cache.keys.zero_(), cache.values.zero_()
    query = kernels.rope_and_cache(
        qkv,
        cache,
        positions,
        slots,
        angles.cos() if rotary else None,
        angles.sin() if rotary else None,
        q_norm=q_norm if normed else None,
        k_norm=k_norm if normed else None,
        eps=1e-6,
        weight_offset=1.0,
    )
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    q, k, v = (part.view(rows, -1, dim) for part in qkv.split(sizes, dim=-1))
    if normed:
        q = functional.rms_norm(q, (dim,), 1 + q_norm, 1e-6)
        k = functional.rms_norm(k, (dim,), 1 + k_norm, 1e-6)
    torch.testing.assert_close(query, rotated(q, angles[positions]))
    keys, values = read_cache(cache, slots[slots >= 0])
    expected = rotated(k, angles[positions])[slots >= 0]
    torch.testing.assert_close(keys.float(), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(values, v[slots >= 0].half())
    # Nothing else was written.
    assert int(cache.values.count_nonzero()) == int(values.count_nonzero())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_write_cache(kernels: CpuKernels, dtype: torch.dtype) -> None:
    random = generator("store")
    cache = make_cache(3, 48, 2, 24, 7, dtype)
    slots = torch.randperm(144, generator=random)[:40]
    key = torch.randn(40, 2, 24, generator=random)
    value = torch.randn(40, 2, 7, generator=random)
    kernels.write_cache(cache, key, value, slots)
    keys, values = read_cache(cache, slots)
    assert torch.equal(keys, key.to(dtype))
    assert torch.equal(values, value.to(dtype))


def test_places_out_of_bounds_are_refused(kernels: CpuKernels) -> None:
    cache = make_cache(2, 16, 1, 8, 8, torch.float32)
    row, zero = torch.zeros(1, 1, 8), torch.tensor([0])
    for slot in (-2, 32):
        with pytest.raises(IndexError, match="slot"):
            kernels.write_cache(cache, row, row, torch.tensor([slot]))
    angles = torch.zeros(4, 4)
    for position in (-1, 4):
        with pytest.raises(IndexError, match="position"):
            kernels.rope_and_cache(
                torch.zeros(1, 24), cache, torch.tensor([position]), zero, angles, angles
            )
    for table, length in (([[2]], 5), ([[-1]], 5), ([[0]], 17)):
        with pytest.raises(IndexError, match="block"):
            kernels.attention(
                row,
                cache,
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([length], dtype=torch.int32),
                torch.tensor(table, dtype=torch.int32),
                scale=1.0,
            )


def test_a_cache_states_its_bounds() -> None:
    with pytest.raises(ValueError, match="block_size is 24; it must be a multiple of 16"):
        make_cache(1, 24, 1, 8, 8, torch.float32)
    with pytest.raises(ValueError, match="float32 or float16"):
        make_cache(1, 16, 1, 8, 8, torch.bfloat16)


# ---- Attention ----


class Case:
    """One kind of layer, and some sequences that are wholly in its cache, in shuffled blocks."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (16, 16),
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        random: torch.Generator | None = None,
    ) -> None:
        random = random or generator("attention")
        self.lengths, self.window, self.softcap = lengths, window, softcap
        self.block_size, self.dtype = block_size, dtype
        self.scale = 2 * dims[0] ** -0.5
        self.query = [torch.randn(n, heads[0], dims[0], generator=random) for n in lengths]
        self.key = [torch.randn(n, heads[1], dims[0], generator=random) for n in lengths]
        self.value = [torch.randn(n, heads[1], dims[1], generator=random) for n in lengths]
        self.sinks = torch.randn(heads[0], generator=random) if sinks else None
        blocks = -(-max(lengths) // block_size)
        order = torch.randperm(len(lengths) * blocks + 1, generator=random)
        self.tables = order[:-1].view(len(lengths), blocks).int()

    def filled(self, kernels: CpuKernels) -> KvCache:
        """Return a cache with all sequences. The rest of it is NaN, so that a read of the rest
        shows.
        """
        _, kv_heads, dim = self.key[0].shape
        blocks = self.tables.numel() + 1
        cache = make_cache(
            blocks, self.block_size, kv_heads, dim, self.value[0].shape[2], self.dtype
        )
        assert cache.keys is not None
        cache.keys.fill_(math.nan), cache.values.fill_(math.nan)
        for i, length in enumerate(self.lengths):
            position = torch.arange(length)
            slots = self.tables[i, position // self.block_size].long() * self.block_size
            slots += position % self.block_size
            kernels.write_cache(cache, self.key[i], self.value[i], slots)
        return cache

    def run(self, kernels: CpuKernels, cache: KvCache, spans: list[tuple[int, int, int]]) -> Tensor:
        """spans: (sequence, first query, end of queries); what is after the end is unknown yet."""
        counts = [end - first for _, first, end in spans]
        return kernels.attention(
            torch.cat([self.query[i][first:end] for i, first, end in spans]),
            cache,
            torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            torch.tensor([end for *_, end in spans], dtype=torch.int32),
            self.tables[[i for i, *_ in spans]].contiguous(),
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def expected(self, i: int) -> Tensor:
        """Return attention of sequence i, computed in float64."""
        length, heads, _ = self.query[i].shape
        group = heads // self.key[i].shape[1]
        key = self.key[i].to(self.dtype).double().repeat_interleave(group, 1)
        value = self.value[i].to(self.dtype).double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", self.query[i].double(), key) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.window is not None:
            unseen |= torch.ones(length, length, dtype=torch.bool).tril(-self.window)
        scores = scores.masked_fill(unseen, -math.inf)
        if self.sinks is not None:
            sink = self.sinks.double().view(-1, 1, 1).expand(-1, length, 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("hqk,khd->qhd", weights, value)


CASES: dict[str, Callable[[], Case]] = {
    "plain": lambda: Case((70, 1, 300)),
    "one head, tiny": lambda: Case((40, 17), heads=(1, 1), dims=(8, 8)),
    "many heads to one": lambda: Case((33,), heads=(50, 1)),
    "float16 cache": lambda: Case((300, 20), dims=(64, 64), dtype=torch.float16),
    "head of 80": lambda: Case((60,), heads=(3, 3), dims=(80, 80), block_size=32),
    "head of 256": lambda: Case((40,), heads=(2, 1), dims=(256, 256)),
    "values of their own size": lambda: Case((270,), dims=(24, 40), block_size=256),
    "odd sizes": lambda: Case((290,), heads=(3, 1), dims=(5, 3), dtype=torch.float16),
    "window": lambda: Case((300, 8), window=19),
    "window of one": lambda: Case((40,), window=1),
    "softcap": lambda: Case((50, 280), softcap=3.0),
    "sinks": lambda: Case((50, 280), sinks=True),
    "everything": lambda: Case(
        (300, 31), heads=(6, 2), dims=(8, 24), window=270, softcap=5.0, sinks=True
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def whole(case: Case) -> list[tuple[int, int, int]]:
    return [(i, 0, length) for i, length in enumerate(case.lengths)]


def test_attention_is_softmax_over_what_a_query_sees(kernels: CpuKernels, case: Case) -> None:
    result = case.run(kernels, case.filled(kernels), whole(case)).split(case.lengths)
    for i, part in enumerate(result):
        torch.testing.assert_close(part.double(), case.expected(i), rtol=1e-4, atol=5e-6)


def test_a_query_has_the_same_bits_in_prefill_chunks_and_decode(
    kernels: CpuKernels, case: Case
) -> None:
    cache = case.filled(kernels)
    together = case.run(kernels, cache, whole(case)).split(case.lengths)
    random = seeded("spans")
    for i, length in enumerate(case.lengths):
        for position in {0, 15, 16, length - 1, *random.sample(range(length), min(12, length))}:
            if position < length:
                alone = case.run(kernels, cache, [(i, position, position + 1)])
                assert torch.equal(alone[0], together[i][position]), f"{i}, {position}"
    for _ in range(budget(3, 40)):
        cuts = [sorted({0, n, *(random.randrange(n + 1) for _ in range(3))}) for n in case.lengths]
        chunks = [(i, *pair) for i, cut in enumerate(cuts) for pair in itertools.pairwise(cut)]
        random.shuffle(chunks)
        counts = [end - first for _, first, end in chunks]
        parts = case.run(kernels, cache, chunks).split(counts)
        for (i, first, end), part in zip(chunks, parts, strict=True):
            assert torch.equal(part, together[i][first:end]), f"{i}, {first} to {end}"


def test_a_later_key_that_is_not_a_number_changes_no_earlier_query(kernels: CpuKernels) -> None:
    clean = Case((60,), heads=(4, 1))
    before = clean.run(kernels, clean.filled(kernels), whole(clean))
    clean.key[0][37], clean.value[0][45] = math.nan, math.nan
    after = clean.run(kernels, clean.filled(kernels), whole(clean))
    assert torch.equal(after[:37], before[:37])
    assert after[37:].isnan().all()


def test_no_sequences_is_no_work(kernels: CpuKernels) -> None:
    cache = make_cache(1, 16, 1, 8, 8, torch.float32)
    none = torch.zeros(0, dtype=torch.int32)
    result = kernels.attention(
        torch.zeros(0, 1, 8),
        cache,
        torch.zeros(1, dtype=torch.int32),
        none,
        none.view(0, 1),
        scale=1.0,
    )
    assert result.shape == (0, 1, 8)
    assert kernels.linear(torch.zeros(0, 4), kernels.pack(torch.ones(3, 4), "int8")).shape == (0, 3)


# ---- The same bits whatever the threads, the level and the other rows ----


def everything(kernels: CpuKernels, rows: int, poison: bool = False) -> list[Tensor]:
    """Results of all kernels for inputs that are the same at each call; with `poison`, row 1 of
    each input has a value that is not a number and one that is infinite.
    """
    random = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 160, generator=random)
    weight = torch.randn(200, 160, generator=random)
    gate_up = torch.randn(rows, 90, generator=random)
    case = Case((40, 300), heads=(6, 2), dims=(24, 40), sinks=True, softcap=20.0, random=random)
    for part in (x, gate_up):
        if poison:
            part[1, 3::40], part[1, 7] = math.nan, math.inf
    results = [kernels.linear(x, kernels.pack(weight, kind)) for kind in WEIGHT_KINDS]
    for layout in LAYOUTS:
        codes = random_codes(200, 160, layout, random)
        results += [kernels.linear(x, kernels.pack_codes([codes], layout))]
    results += [kernels.add_rms_norm(x, None, weight[0], 1e-6)]
    results += [kernels.gated_activation(gate_up, kind) for kind in ACTIVATIONS]
    cache = make_cache(-(-rows // 16), 16, 1, 40, 40, torch.float16)
    angles = torch.rand(rows, 20, generator=random)
    results += [
        kernels.rope_and_cache(
            x, cache, torch.arange(rows), torch.arange(rows), angles.cos(), angles.sin(),
            q_norm=weight[0, :40].contiguous(), k_norm=weight[1, :40].contiguous(), eps=1e-6,
        )
    ]  # fmt: skip
    keys, values = read_cache(cache, torch.arange(rows))
    return [*results, keys, values, case.run(kernels, case.filled(kernels), whole(case))]


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_bits_do_not_depend_on_the_threads(kernels: CpuKernels) -> None:
    alone = everything(kernels, 70)
    for threads in (2, 3, 1):
        kernels.set_threads(threads)
        assert same_bits(everything(kernels, 70), alone), f"{threads} threads"


def test_bits_do_not_depend_on_the_level(all_levels: list[CpuKernels]) -> None:
    best, *lower = all_levels
    expected = everything(best, 70)
    for kernels in lower:
        assert same_bits(everything(kernels, 70), expected), kernels.level


def test_a_row_that_is_not_a_number_leaves_the_others_alone(kernels: CpuKernels) -> None:
    clean, poisoned = everything(kernels, 9), everything(kernels, 9, poison=True)
    others = [0, *range(2, 9)]
    for before, after in zip(clean[:-1], poisoned[:-1], strict=True):
        assert torch.equal(before[others], after[others])
        assert after[1].isnan().any()


def test_calls_of_several_python_threads_take_turns(kernels: CpuKernels) -> None:
    kernels.set_threads(2)
    packed = [kernels.pack(torch.randn(300, 200), "float16") for _ in range(3)]
    x = torch.randn(20, 200)
    expected = [kernels.linear(x, weight) for weight in packed]

    def right(i: int) -> bool:
        results = (kernels.linear(x, packed[i]) for _ in range(budget(30, 3000)))
        return all(torch.equal(result, expected[i]) for result in results)

    with ThreadPoolExecutor() as callers:
        assert all(callers.map(right, range(3)))
    kernels.set_threads(1)


# ---- The process around the kernels ----


# Later versions of Python warn of a fork where threads run; that this works is the point.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes_and_has_threads_of_its_own(kernels: CpuKernels) -> None:
    kernels.set_threads(2)
    weight, x = kernels.pack(torch.randn(300, 200), "float16"), torch.randn(20, 200)
    expected = kernels.linear(x, weight).numpy()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        right = 0
        for threads in (2, 3, 1):
            right += bool((kernels.linear(x, weight).numpy() == expected).all())
            kernels.set_threads(threads)
        os._exit(right)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert (kernels.linear(x, weight).numpy() == expected).all()
    kernels.set_threads(1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_lack_of_memory_is_an_error_and_the_next_call_works(kernels: CpuKernels) -> None:
    weight = kernels.pack(torch.ones(1, 1 << 17), "int8")
    # 512 MiB that are never touched; in int8, for which there is no room, a quarter of it.
    x, out = torch.empty(1024, 1 << 17), torch.empty(1024, 1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, hard))
    try:
        with pytest.raises(MemoryError, match="no scratch memory for the cpu kernels"):
            kernels.linear(x, weight, out=out)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert kernels.linear(torch.ones(2, 1 << 17), weight).tolist() == [[1 << 17]] * 2


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        in_soak("llama", None),
        in_soak("llama", "int8"),
        in_soak("gemma3", None),
        ("gemma3", "int8"),
        ("gpt2", None),
        in_soak("gpt2", "int8"),
    ],
)
def test_every_level_of_the_kernels_gives_the_same_bits(
    family: str,
    quantization: str | None,
    model_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for level in levels_here():
        monkeypatch.setenv("PENSTOCK_CPU_LEVEL", level)
        runner = load(model_dir(family), dtype="auto", quantization=quantization)
        found.append((cut_logits(runner)[1], runner.info.numerics_fingerprint))
    logits, fingerprints = zip(*found, strict=True)
    assert all(torch.equal(part, logits[0]) for part in logits)
    assert len(set(fingerprints)) == 1
