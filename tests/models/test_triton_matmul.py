"""Triton's products, in its interpreter, against float64; a row's bits among others."""

from __future__ import annotations

import os

import pytest
import torch
from support.budget import seeded
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a device here", allow_module_level=True)

from penstock_shard.kernels.triton_matmul import fixed_linear, grouped_linear, tiling

F32, BF16 = torch.float32, torch.bfloat16
# Of sums of products of numbers near 1, relative to their spread.
TOLERANCE = {F32: 1e-5, BF16: 2e-2}


def noise(seed: int, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor) -> None:
    bound = TOLERANCE[got.dtype] * float(want.std())
    torch.testing.assert_close(got.double(), want, atol=bound, rtol=TOLERANCE[got.dtype])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 40, 32), (3, 70, 50), (65, 33, 129), (130, 64, 64)]
)
def test_a_product_is_right(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, weight = noise(1, rows, depth, dtype=dtype), noise(2, columns, depth, dtype=dtype)
    bias = noise(3, columns, dtype=dtype)
    want = x.double() @ weight.double().T
    close(fixed_linear(x, weight), want)
    out = torch.empty(rows, columns, dtype=dtype)
    assert fixed_linear(x, weight, bias, out) is out
    close(out, want + bias.double())


def test_rows_of_experts_meet_their_own_weights() -> None:
    rng = seeded("experts")
    counts = [0, *(rng.choice([0, 1, 2, 17, 40]) for _ in range(5)), 3, 0]
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    x, weights = noise(1, sum(counts), 48), noise(2, len(counts), 36, 48)
    parts = zip(x.split(counts), weights, strict=True)
    want = torch.cat([part.double() @ weight.double().T for part, weight in parts])
    for exact in (False, True):
        close(grouped_linear(x, weights, offsets, exact=exact), want)


def test_no_rows_are_no_work() -> None:
    assert fixed_linear(torch.empty(0, 8), torch.ones(4, 8)).shape == (0, 4)
    nothing = grouped_linear(
        torch.empty(0, 8), torch.ones(2, 4, 8), torch.zeros(3, dtype=torch.int32)
    )
    assert nothing.shape == (0, 4)


def test_a_row_has_the_same_bits_among_any_others() -> None:
    rng = seeded("rows")
    x, weight = noise(1, 140, 96), noise(2, 40, 96)
    weights = noise(3, 3, 40, 96)
    alone = fixed_linear(x[:1], weight)
    by_expert = grouped_linear(x[:1], weights, torch.tensor([0, 0, 1, 1]).int(), exact=True)
    for rows in (2, 64, 140):
        others = x[1:rows][torch.randperm(rows - 1)]
        place = rng.randrange(rows)
        among = torch.cat([others[:place], x[:1], others[place:]])
        assert torch.equal(fixed_linear(among, weight)[place], alone[0])
        offsets = torch.tensor([0, place // 2, rows, rows]).int()
        found = grouped_linear(among, weights, offsets, exact=True)[place]
        assert torch.equal(found, by_expert[0])


# Bytes of shared memory for one program: of an H100, an A100 and an L4.
@pytest.mark.parametrize("shared", [227 << 10, 163 << 10, 99 << 10])
@pytest.mark.parametrize("columns", [1024, 4096, 6144, 28672, 128256])
def test_a_weight_has_tiles_of_one_width_for_any_number_of_rows_and_on_any_card(
    columns: int, shared: int
) -> None:
    few, many = (tiling(columns, 4096, 2, shared, rows=rows) for rows in (64, 128))
    assert (few.columns, few.depth) == (many.columns, many.depth)
    for tile in (few, many):
        assert (tile.rows + tile.columns) * tile.depth * 2 * tile.num_stages <= shared
        assert tile.num_stages > 1
        there = tiling(columns, 4096, 2, 227 << 10, rows=tile.rows)
        assert (tile.columns, tile.depth) == (there.columns, there.depth)
