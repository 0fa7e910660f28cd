"""A row's result is the same to the last bit alone, in any batch, on any number of threads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models.drawer import Drawer, SampleRow
from models.sampling_reference import KINDS, sampling_request
from support.budget import budget, seeded

from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import RowResult
from penstock_shard.worker.sampling import top_k_top_p
from penstock_shard.worker.sampling.top_k_top_p import Columns, Rows, ordered_topk, weigh

_MOST = budget(32, 64)
SIZES = (1, 2, 3, 7, _MOST)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _requests(rng: random.Random, count: int) -> list[Sequence]:
    """Every kind of sampling, and log-probabilities for some."""
    kinds: list[dict[str, Any]] = [dict(fields) for fields in KINDS.values()]
    kinds += [{"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.2}]
    kinds += [{"top_p": 0.999, "temperature": 5.0}, {"top_k": 1500, "top_p": 0.95}]
    return [
        sampling_request(
            [rng.randrange(24) for _ in range(9)],
            [rng.randrange(24) for _ in range(rng.randint(0, 9))],
            **{
                **kinds[i % len(kinds)],
                "seed": rng.getrandbits(64),
                "logprobs": rng.choice([None, 0, 3, 12]),
                "logprob_token_ids": rng.choice([(), (5, 1)]),
            },
        )
        for i in range(count)
    ]


def _sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[RowResult]:
    return Drawer().sample(logits, [SampleRow(r, r.num_output_tokens) for r in sequences])


@pytest.mark.parametrize("vocabulary", [33, 5003, 32_001])
def test_a_row_is_the_same_alone_and_beside_any_others(vocabulary: int) -> None:
    rng = seeded("batch")
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    torch.set_num_threads(1)
    sequences = _requests(rng, _MOST)
    spread = torch.linspace(0.1, 6, _MOST)[:, None]
    logits = torch.randn(_MOST, vocabulary, generator=generator) * spread
    logits[::3] = torch.round(logits[::3])
    alone = [_sample(logits[i : i + 1], sequences[i : i + 1])[0] for i in range(_MOST)]
    assert all(result.error is None for result in alone)
    for _ in range(budget(2, 20)):
        for size in SIZES:
            torch.set_num_threads(rng.choice([1, 2]))
            chosen = rng.sample(range(_MOST), size)
            together = _sample(logits[chosen], [sequences[i] for i in chosen])
            assert together == [alone[i] for i in chosen]


@pytest.mark.parametrize("typical_p", [1.0, 0.9])
def test_a_row_with_top_k_is_the_same_however_many_tokens_others_need(
    typical_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are ranked: as many as it needs itself, as the largest k needs, or all."""
    rng = seeded("ranks")
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    vocabulary, ks = 5003, [1, 2, 3, 50, 64, 1000, 1024, 1025, 3000, 5003]
    # Few distinct values: at nearly every k some beside it are equal.
    logits = torch.round(torch.randn(2 * len(ks), vocabulary, generator=generator) * 4)
    sequences = [
        sampling_request(
            (),
            (),
            top_k=k,
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.01]),
            typical_p=typical_p,
            seed=rng.getrandbits(64),
        )
        for k in ks + ks
    ]
    alone = [_sample(logits[i : i + 1], sequences[i : i + 1])[0] for i in range(len(sequences))]
    for _ in range(budget(10, 100)):
        chosen = rng.sample(range(len(sequences)), rng.randint(2, len(sequences)))
        together = _sample(logits[chosen], [sequences[i] for i in chosen])
        assert together == [alone[i] for i in chosen]
    monkeypatch.setattr(
        top_k_top_p,
        "ordered_topk",
        lambda values, k: ordered_topk(values, values.shape[1])[:, : max(k, vocabulary - 7)],
    )
    assert _sample(logits, sequences) == alone


@pytest.mark.parametrize(
    ("ks", "ranked"),
    [
        ([1], [1]),
        ([20, 50, 7], [50]),
        # One that needs very many does not make the others rank them.
        ([20, 3000, 50], [50, 3000]),
        # Without top-k nobody knows how many are enough.
        ([0, 20], [20, 1024]),
    ],
)
def test_a_step_ranks_as_many_tokens_as_its_largest_top_k(
    ks: list[int], ranked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []

    def noted(values: torch.Tensor, k: int) -> torch.Tensor:
        widths.append(k)
        return ordered_topk(values, k)

    monkeypatch.setattr(top_k_top_p, "ordered_topk", noted)
    logits = torch.randn(len(ks), 5003, generator=torch.Generator().manual_seed(1)) * 9
    _sample(logits, [sampling_request((), (), top_k=k, top_p=0.9) for k in ks])
    assert sorted(widths) == ranked


@pytest.mark.parametrize("vocabulary", [13, 999, 32_001, 150_001])
def test_weights_are_the_same_to_the_last_bit(vocabulary: int) -> None:
    """Weights are all that a token depends on beside whole numbers. A bit that differs in a weight
    seldom changes a token, so tokens alone would not show it.
    """
    rng = seeded("weights")
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    count = 64 if vocabulary < 100_000 else 8
    logits = torch.randn(count, vocabulary, generator=generator) * 4

    def weights(rows: torch.Tensor) -> torch.Tensor:
        own = Columns(*(np.full(len(rows), value) for value in (0.7, 0.0, 1.0, 0.0, 1.0, 0.5)))
        return weigh(Rows(rows, rows.amax(dim=1), np.arange(len(rows)), own).scaled)

    torch.set_num_threads(1)
    expected = weights(logits)
    for size in (size for size in SIZES if size <= count):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            first = rng.randrange(count - size + 1)
            chosen = rng.sample(range(count), size)
            assert torch.equal(
                weights(logits[first : first + size]), expected[first : first + size]
            )
            assert torch.equal(weights(logits[chosen]), expected[chosen])


def test_log_probabilities_are_the_same_to_the_last_bit() -> None:
    rng = seeded("log-probabilities")
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    logits = torch.randn(9, 150_001, generator=generator) * 3
    sequences = [
        sampling_request(temperature=0.0, logprobs=i, logprob_token_ids=(7, 150_000))
        for i in range(9)
    ]
    torch.set_num_threads(1)
    alone = [_sample(logits[i : i + 1], sequences[i : i + 1])[0] for i in range(9)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in (1, 2, 9):
            chosen = rng.sample(range(9), size)
            assert _sample(logits[chosen], [sequences[i] for i in chosen]) == [
                alone[i] for i in chosen
            ]
