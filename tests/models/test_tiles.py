"""Products by tiles, with a model in C of the instructions: no machine at hand has had them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models.driver import Driver, load, make_sequence
from support.budget import budget, seeded
from support.kernel_levels import levels_here
from torch import Tensor

from penstock_shard.kernels.build_cpu import MODEL_OF_TILES, TILES, supported_levels
from penstock_shard.kernels.cpu import CpuKernels, load_kernels
from penstock_shard.kernels.weight_layouts import CodeLayout
from penstock_shard.model_loader.choices import choose_ops
from penstock_shard.worker.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(
    "avx512" not in supported_levels(), reason="this processor has no AVX-512"
)
Directory = Callable[[str], Path]
ROWS = (1, 4, 5, 6, 15, 16, 17, 33, 241)


@pytest.fixture(scope="module")
def tiles() -> CpuKernels:
    return load_kernels(MODEL_OF_TILES)


@pytest.fixture(scope="module")
def vectors() -> CpuKernels:
    level = next(level for level in levels_here() if level.startswith("avx512") and level != TILES)
    return load_kernels(level)


def random(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(seeded(name).randrange(2**31))


# One and several pieces; ends that are no whole tile; more outputs than panels are filled with.
@pytest.mark.parametrize(("n", "k"), [(64, 64), (200, 160), (70, 333), (16, 20)])
def test_sums_of_codes_have_the_bits_of_every_level(
    n: int, k: int, tiles: CpuKernels, vectors: CpuKernels
) -> None:
    generator = random("codes")
    weight = torch.randn(n, k, generator=generator)
    layouts = [CodeLayout(8, 64, 128), CodeLayout(8, 128, 32, has_minimums=True)]
    for rows in ROWS:
        x = torch.randn(rows, k, generator=generator)
        x[rows // 2] *= 1e30
        both = [kernels.linear(x, kernels.pack(weight, "int8")) for kernels in (tiles, vectors)]
        assert torch.equal(*both), rows
        for layout in layouts:
            groups = (n, -(-k // layout.group))
            codes = (
                torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=generator),
                torch.randn(groups, generator=generator),
                torch.randn(groups, generator=generator) if layout.has_minimums else None,
            )
            both = [
                kernels.linear(x, kernels.pack_codes([codes], layout))
                for kernels in (tiles, vectors)
            ]
            assert torch.equal(*both), (rows, layout)


def bfloats(kernels: CpuKernels, x: Tensor, weight: Tensor) -> Tensor:
    return kernels.linear(x, kernels.pack(weight, "bfloat16"))


@pytest.mark.parametrize("k", [1, 31, 32, 100, 600])
def test_products_of_bfloat16_are_right_and_depend_on_their_row_alone(
    k: int, tiles: CpuKernels
) -> None:
    generator = random("bfloat16")
    x, weight = torch.randn(241, k, generator=generator), torch.randn(90, k, generator=generator)
    bias = torch.randn(90, generator=generator)
    whole = tiles.linear(x, tiles.pack(weight, "bfloat16"), bias)
    exact = x.bfloat16().double() @ weight.bfloat16().double().T + bias
    assert (whole - exact).abs().max() < 1e-4 * k**0.5
    for _ in range(budget(6, 60)):
        first = int(torch.randint(0, 240, (), generator=generator))
        count = int(torch.randint(1, 40, (), generator=generator))
        tiles.set_threads(count % 3 + 1)
        some = tiles.linear(x[first : first + count], tiles.pack(weight, "bfloat16"), bias)
        assert torch.equal(some, whole[first : first + count])
    tiles.set_threads(1)


def test_first_and_second_values_are_summed_apart(tiles: CpuKernels, vectors: CpuKernels) -> None:
    """The second values of 16 pairs, 1 each, would be lost one by one beside a large first one."""
    x, weight = torch.ones(1, 32), torch.ones(1, 32)
    weight[0, ::2] = 0.0
    weight[0, 0] = 2.0**24
    assert bfloats(tiles, x, weight).item() == 2.0**24 + 16
    assert bfloats(vectors, x, weight).item() == 2.0**24


def test_what_is_subnormal_counts_as_zero(tiles: CpuKernels) -> None:
    tiny = torch.full((1, 2), 2.0**-70)
    assert bfloats(tiles, tiny, tiny).item() == 0.0
    x = torch.full((1, 2), 2.0**-130)
    assert bfloats(tiles, x, torch.full((1, 2), 2.0**20)).item() == 0.0


def runner(
    directory: Path, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch, **settings: str
) -> ModelRunner:
    monkeypatch.setattr(choose_ops, "load_kernels", lambda **_: kernels)
    return load(directory, **settings)


def tokens(found: ModelRunner) -> list[tuple[int | None, object]]:
    sequence = make_sequence([3, 1, 4, 1, 5, 9, 2, 6], max_tokens=8, logprobs=1)
    driver = Driver(found)
    results = [driver.step([(sequence, sequence.num_uncomputed)])[0] for _ in range(8)]
    return [(result.token_id, result.logprobs) for result in results]


def test_a_model_of_int8_is_the_same_by_tiles(
    tiles: CpuKernels, vectors: CpuKernels, model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        runner(model_dir("llama"), kernels, monkeypatch, dtype="auto", quantization="int8")
        for kernels in (tiles, vectors)
    ]
    assert tokens(found[0]) == tokens(found[1])
    assert found[0].info.numerics_fingerprint == found[1].info.numerics_fingerprint != ""


@pytest.mark.usefixtures("whole_check")
def test_a_model_of_bfloat16_by_tiles_has_a_fingerprint_of_its_own(
    tiles: CpuKernels, vectors: CpuKernels, model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_tiles, by_vectors = (
        runner(model_dir("llama"), kernels, monkeypatch, dtype="bfloat16")
        for kernels in (tiles, vectors)
    )
    assert by_tiles.info.batch_invariant
    assert by_tiles.info.numerics_fingerprint != by_vectors.info.numerics_fingerprint
