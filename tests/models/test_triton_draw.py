"""Rows that no window holds get the same tokens from the kernel as from sorting all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.budget import budget, seeded
from support.triton_interpreter import use_interpreter

if not use_interpreter():
    pytest.skip("there is no Triton here", allow_module_level=True)

from penstock_shard.models import triton_here
from penstock_shard.models.kernels import triton_draw
from penstock_shard.runner import draw as drawing
from penstock_shard.runner.draw import Columns, draw

VOCABULARY = 300


def test_the_kernel_draws_what_sorting_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = seeded("draws without a look")
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    for _ in range(budget(1, 60)):
        count = 5
        spread = torch.tensor([rng.choice([0.0, 0.01, 0.3, 1.0, 4.0]) for _ in range(count)])
        logits = torch.randn(count, VOCABULARY, generator=generator) * spread[:, None]
        if rng.random() < 0.5:
            # Ties nearly everywhere.
            logits = torch.round(logits * 3) / 3
        columns = Columns(
            np.array([rng.choice([0.5, 1.0, 5.0]) for _ in range(count)]),
            np.zeros(count),
            np.array([rng.choice([0.3, 0.9, 0.99, 0.999999]) for _ in range(count)]),
            np.array([rng.choice([0.0, 0.0, 0.01, 0.5]) for _ in range(count)]),
            np.ones(count),
            np.array([rng.choice([0.0, rng.random(), 1 - 2.0**-53]) for _ in range(count)]),
        )
        best, index = logits.amax(dim=1), np.arange(count)
        expected = draw(logits, best, index, columns)
        with monkeypatch.context() as patch:
            patch.setattr(drawing, "_WINDOW", rng.choice([1, 8, 64]))
            patch.setattr(drawing, "is_host", lambda _: False)
            assert torch.equal(draw(logits, best, index, columns), expected)


def test_rows_that_are_settled_are_left_alone() -> None:
    from penstock_shard.models.kernels.triton_draw import draw_unsettled

    scaled = torch.zeros(2, 9)
    numbers = torch.full((2, 1), 9 * 7)
    tokens = torch.tensor([77, 77])
    draw_unsettled(
        scaled,
        torch.full((2, 9), 7),
        numbers,
        torch.zeros_like(numbers),
        torch.full((2, 1), 0.5, dtype=torch.float64),
        torch.tensor([[True], [False]]),
        tokens,
    )
    assert tokens.tolist() == [77, 4]


def test_nothing_is_launched_where_kernels_were_found_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = list[bool]()
    monkeypatch.setattr(triton_draw, "draw_unsettled", lambda *arguments: launched.append(True))
    monkeypatch.setattr(drawing, "is_host", lambda _: False)
    monkeypatch.setattr(drawing, "_WINDOW", 8)
    one = np.ones(1)
    columns = Columns(one, 0 * one, 0.9 * one, 0 * one, one, 0.5 * one)
    logits = torch.zeros(1, VOCABULARY)
    try:
        triton_here.remember("cpu", "they are wrong")
        draw(logits, logits.amax(dim=1), np.arange(1), columns)
        assert not launched
    finally:
        triton_here.remember("cpu", None)
    draw(logits, logits.amax(dim=1), np.arange(1), columns)
    assert launched
