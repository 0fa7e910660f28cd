"""Kernels draw what plain torch draws: by id, and of rows that no window holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.budget import budget, seeded
from support.triton_interpreter import use_interpreter

if not use_interpreter():
    pytest.skip("there is no Triton here", allow_module_level=True)

from penstock_shard.device import triton_support
from penstock_shard.kernels import triton_draw
from penstock_shard.worker.sampling import draw as drawing
from penstock_shard.worker.sampling import top_k_top_p
from penstock_shard.worker.sampling.draw import draw
from penstock_shard.worker.sampling.top_k_top_p import Columns

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
            patch.setattr(top_k_top_p, "_WINDOW", rng.choice([1, 8, 64]))
            for module in (drawing, top_k_top_p):
                patch.setattr(module, "is_host", lambda _: False)
            assert torch.equal(draw(logits, best, index, columns), expected)


def test_rows_that_are_settled_are_left_alone() -> None:
    from penstock_shard.kernels.triton_draw import draw_unsettled

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


def only_temperature(temperature: list[float], min_p: list[float], share: list[float]) -> Columns:
    ones = np.ones(len(share))
    return Columns(np.array(temperature), 0 * ones, ones, np.array(min_p), ones, np.array(share))


def drawn_there(
    monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, index: list[int], columns: Columns
) -> torch.Tensor:
    """By the kernels that are used on a device."""
    with monkeypatch.context() as patch:
        patch.setattr(top_k_top_p, "is_host", lambda _: False)
        patch.setattr(drawing, "Rows", None)
        return draw(logits, logits.amax(dim=1), np.array(index), columns)


def test_by_id_the_kernels_draw_what_plain_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save where a share ends so near to a token's that the last bits of a weight decide."""
    rng = seeded("draws by id")
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    for vocabulary in rng.choices([1, 2, 4095, 4096, 4097, 9001], k=budget(6, 120)):
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        logits = (torch.randn(5, vocabulary, generator=generator) * rng.choice([0.1, 3, 30])).to(
            dtype
        )
        index = sorted(rng.sample(range(5), rng.randint(1, 5)))
        columns = only_temperature(
            [rng.choice([1e-9, 0.5, 1.0, 5.0]) for _ in index],
            [rng.choice([0.0, 0.0, 1e-3, 0.5, 1.0]) for _ in index],
            [rng.choice([0.0, rng.random(), 1 - 2.0**-53]) for _ in index],
        )
        expected = draw(logits, logits.amax(dim=1), np.array(index), columns)
        found = drawn_there(monkeypatch, logits, index, columns)
        for i in (found != expected).nonzero().flatten().tolist():
            scaled = logits[index[i]].double()
            weights = ((scaled - scaled.max()) / max(columns.temperature[i], 1e-6)).exp()
            cumulative = (weights * (weights >= columns.min_p[i])).cumsum(0)
            first, last = sorted((int(found[i]), int(expected[i])))
            between = cumulative[first:last] / cumulative[-1] - columns.uniform[i]
            assert between.abs().max() < 1e-6, (vocabulary, i)


def test_by_id_equals_share_alike_and_a_row_is_the_same_in_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = seeded("draws by id alike")
    logits = torch.randn(4, 9001, generator=torch.Generator().manual_seed(rng.randrange(2**32)))
    logits[2] = 7.0
    shares = [0.25, rng.random(), rng.random(), 0.5]
    columns = only_temperature([1.0, 0.7, 3.0, 1e-9], [0.1, 1.0, 0.0, 0.0], shares)
    tokens = drawn_there(monkeypatch, logits, [0, 1, 2, 3], columns)
    assert tokens[2] == int(shares[2] * 9001)
    # One that is as likely as the likeliest is kept by any min-p.
    assert tokens[1] == logits[1].argmax()
    assert tokens[3] == logits[3].argmax()
    for i in range(4):
        alone = columns.only(np.array([i]))
        assert drawn_there(monkeypatch, logits, [i], alone) == tokens[i]
        # However the logits lie in memory.
        assert drawn_there(monkeypatch, logits.T.contiguous().T, [i], alone) == tokens[i]


@pytest.mark.parametrize("vocabulary", [1, 3, 4096, 5000])
def test_by_id_a_row_that_has_one_token_gets_it_and_one_without_numbers_any(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.full((4, vocabulary), float("-inf"))
    logits[0, -1] = -3.0
    logits[1, vocabulary // 2] = float("nan")
    logits[2, 0] = float("inf")
    columns = only_temperature([1.0] * 4, [0.0, 0.0, 0.1, 0.0], [0.0, 0.5, 0.9, 1 - 2.0**-53])
    tokens = drawn_there(monkeypatch, logits, [0, 1, 2, 3], columns)
    assert tokens[0] == vocabulary - 1
    assert ((tokens >= 0) & (tokens < vocabulary)).all()


@pytest.mark.parametrize(("kernel", "top_p"), [("draw_unsettled", 0.9), ("draw_by_id", 1.0)])
def test_nothing_is_launched_where_kernels_were_found_wrong(
    kernel: str, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = list[bool]()

    def launch(*arguments: torch.Tensor) -> torch.Tensor:
        launched.append(True)
        return torch.zeros(1, dtype=torch.int64)

    monkeypatch.setattr(triton_draw, kernel, launch)
    for module in (drawing, top_k_top_p):
        monkeypatch.setattr(module, "is_host", lambda _: False)
    monkeypatch.setattr(top_k_top_p, "_WINDOW", 8)
    one = np.ones(1)
    columns = Columns(one, 0 * one, top_p * one, 0 * one, one, 0.5 * one)
    logits = torch.zeros(1, VOCABULARY)
    try:
        triton_support.remember("cpu", "they are wrong")
        draw(logits, logits.amax(dim=1), np.arange(1), columns)
        assert not launched
    finally:
        triton_support.remember("cpu", None)
    draw(logits, logits.amax(dim=1), np.arange(1), columns)
    assert launched
