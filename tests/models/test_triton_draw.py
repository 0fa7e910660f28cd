"""Kernels draw what plain torch draws: by id, and by rank."""

from __future__ import annotations

import random
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.budget import budget, seeded
from support.triton_interpreter import use_interpreter

if not use_interpreter():
    pytest.skip("there is no Triton here", allow_module_level=True)

from penstock_shard.device import triton_support
from penstock_shard.kernels import triton_draw, triton_rank
from penstock_shard.worker.sampling import draw as drawing
from penstock_shard.worker.sampling import top_k_top_p
from penstock_shard.worker.sampling.draw import draw
from penstock_shard.worker.sampling.top_k_top_p import Columns


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a few hundred logits takes several blocks, as a real one does."""
    monkeypatch.setattr(triton_rank, "_BLOCK", 64)


def random_logits(rng: random.Random, count: int, vocabulary: int) -> torch.Tensor:
    """Rows that are flat, peaked, or nearly all alike; with ties nearly everywhere, or logits that
    are minus infinity.
    """
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    spread = [rng.choice([0.0, 1e-6, 0.01, 0.3, 1.0, 4.0, 30.0]) for _ in range(count)]
    logits = torch.randn(count, vocabulary, generator=generator) * torch.tensor(spread)[:, None]
    if rng.random() < 0.5:
        logits = torch.round(logits * 3) / 3
    if rng.random() < 0.3:
        logits[:, : rng.randrange(vocabulary)] = float("-inf")
    return logits


def random_columns(rng: random.Random, count: int, vocabulary: int) -> Columns:
    def some(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([float(rng.choice(values)) for _ in range(count)])

    return Columns(
        some(1e-9, 0.5, 1.0, 5.0),
        some(0, 0, 1, *(min(k, vocabulary - 1) for k in (5, 50, vocabulary))),
        some(1e-9, 0.3, 0.9, 0.99, 0.999999, 1.0),
        some(0.0, 0.0, 0.01, 0.5, 1.0),
        np.ones(count),
        some(0.0, rng.random(), rng.random(), 1 - 2.0**-53),
    )


def test_by_rank_the_kernel_draws_what_sorting_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws agree to the last token, for one row or several, and for lists of any length."""
    rng = seeded("draws by rank")
    for vocabulary in rng.choices([2, 63, 64, 257, 300], k=budget(4, 20)):
        logits = random_logits(rng, 5, vocabulary)
        columns = random_columns(rng, 5, vocabulary)
        # Another kernel draws from rows without top-k and top-p, and not to the last bit.
        columns.top_p[columns.top_k == 0] *= 0.999
        best, index = logits.amax(dim=1), np.arange(5)
        expected = draw(logits, best, index, columns)
        monkeypatch.setattr(triton_rank, "_LISTED", rng.choice([1, 8, 64, 512]))
        assert torch.equal(drawn_there(monkeypatch, logits, [*range(5)], columns), expected)
        alone = rng.randrange(5)
        only = columns.only(np.array([alone]))
        assert drawn_there(monkeypatch, logits, [alone], only) == expected[alone]


def test_by_rank_a_whole_vocabulary_is_drawn_from_as_sorting_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks and lists have the sizes that they have on a device."""
    rng = seeded("draws by rank from many")
    monkeypatch.setattr(triton_rank, "_BLOCK", 2048)
    for _ in range(budget(1, 10)):
        logits = random_logits(rng, 3, 40_000)
        columns = random_columns(rng, 3, 20_000)
        columns.top_p[columns.top_k == 0] *= 0.999
        expected = draw(logits, logits.amax(dim=1), np.arange(3), columns)
        assert torch.equal(drawn_there(monkeypatch, logits, [0, 1, 2], columns), expected)


@pytest.mark.parametrize(
    ("spread", "lead", "sums", "lists"),
    [(0.5, 12.0, 1, 1), (4.0, 0.0, 3, 1), (0.5, 0.0, 3, 2), (0.02, 0.0, 5, 2)],
)
def test_a_row_with_a_few_likely_tokens_is_read_twice_and_a_flat_one_five_times(
    spread: float, lead: float, sums: int, lists: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is read to sum up, and to list: that is what a step with top-p costs a device."""
    rng = seeded("reads of a row")
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    logits = torch.randn(1, 128_256, generator=generator) * spread
    logits[:, 300:320] += lead
    monkeypatch.setattr(triton_rank, "_BLOCK", 2048)
    found = Counter[str]()

    def note(name: str, place: int) -> None:
        function = getattr(triton_rank, name)

        def noted(*arguments: Any) -> Any:
            if int(arguments[place]) == logits.shape[1]:
                found[name] += 1
            return function(*arguments)

        monkeypatch.setattr(triton_rank, name, noted)

    for name, place in (("_sums", 2), ("_list", 3), ("_before", 2), ("_tie", 2)):
        note(name, place)
    one = np.ones(1)
    columns = Columns(one, 0 * one, 0.95 * one, 0 * one, one, 0.6 * one)
    drawn_there(monkeypatch, logits, [0], columns)
    assert found["_sums"] <= sums
    assert found["_list"] <= lists
    assert set(found) <= {"_sums", "_list"}


def only_temperature(temperature: list[float], min_p: list[float], share: list[float]) -> Columns:
    ones = np.ones(len(share))
    return Columns(np.array(temperature), 0 * ones, ones, np.array(min_p), ones, np.array(share))


def drawn_there(
    monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, index: list[int], columns: Columns
) -> torch.Tensor:
    """Draw tokens with the kernels that are used on a device."""
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
def test_a_row_that_has_one_token_gets_it_and_one_without_numbers_any(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_rank, "_BLOCK", 2048)
    logits = torch.full((4, vocabulary), float("-inf"))
    logits[0, -1] = -3.0
    logits[1, vocabulary // 2] = float("nan")
    logits[2, 0] = float("inf")
    by_id = only_temperature([1.0] * 4, [0.0, 0.0, 0.1, 0.0], [0.0, 0.5, 0.9, 1 - 2.0**-53])
    few = by_id._replace(top_k=np.full(4, 2.0), top_p=np.full(4, 0.9))
    for columns in (by_id, by_id._replace(top_p=np.full(4, 0.9)), few):
        tokens = drawn_there(monkeypatch, logits, [0, 1, 2, 3], columns)
        assert tokens[0] == vocabulary - 1
        assert ((tokens >= 0) & (tokens < vocabulary)).all()


@pytest.mark.parametrize(
    ("module", "kernel", "top_p"),
    [(triton_rank, "draw_ranked", 0.9), (triton_draw, "draw_by_id", 1.0)],
)
def test_nothing_is_launched_where_kernels_were_found_wrong(
    module: ModuleType, kernel: str, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = list[bool]()

    def launch(*arguments: torch.Tensor) -> torch.Tensor:
        launched.append(True)
        return torch.zeros(1, dtype=torch.int64)

    monkeypatch.setattr(module, kernel, launch)
    for host in (drawing, top_k_top_p):
        monkeypatch.setattr(host, "is_host", lambda _: False)
    one = np.ones(1)
    columns = Columns(one, 0 * one, top_p * one, 0 * one, one, 0.5 * one)
    logits = torch.zeros(1, 300)
    try:
        triton_support.remember("cpu", "they are wrong")
        draw(logits, logits.amax(dim=1), np.arange(1), columns)
        assert not launched
    finally:
        triton_support.remember("cpu", None)
    draw(logits, logits.amax(dim=1), np.arange(1), columns)
    assert launched
