"""Tokens are drawn from the stated distribution, and from nothing but their own row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock_shard.request import SamplingParams
from penstock_shard.runner.philox import uniforms
from penstock_shard.runner.sampler import SampleRow, ordered_topk, sample, token_logprobs

SEED = 20_261_121
PARAMS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.15),
    "all": SamplingParams(temperature=1.5, top_k=8, top_p=0.9, min_p=0.1),
    "allowed": SamplingParams(allowed_token_ids=(1, 4, 9)),
    "allowed_top_p": SamplingParams(allowed_token_ids=(1, 4, 9, 11), top_p=0.7),
}


def expected_distribution(logits: NDArray[np.float32], params: SamplingParams) -> dict[int, float]:
    """The distribution as defined, token by token; tokens in the order they are drawn in."""
    scores = logits.astype(np.float64)
    if params.allowed_token_ids:
        allowed = np.isin(np.arange(len(scores)), params.allowed_token_ids)
        scores = np.where(allowed, scores, -np.inf)
    weights = np.exp((scores - scores.max()) / params.temperature)
    weights /= weights.sum()
    order = list(range(len(weights)))
    ranked = params.top_p < 1 or 0 < params.top_k < len(weights)
    if ranked:
        order.sort(key=lambda token: (-scores[token], token))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        total = sum(weights[token] for token in order)
        kept, mass = [], 0.0
        for token in order:
            kept.append(token)
            mass += weights[token]
            if mass >= params.top_p * total:
                break
        order = kept
    floor = params.min_p * weights.max()
    order = [token for token in order if weights[token] >= floor and weights[token] > 0]
    total = sum(weights[token] for token in order)
    return {token: float(weights[token] / total) for token in order}


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], position: int = 0) -> list[int]:
    results = sample(logits, [SampleRow(p, position) for p in params])
    tokens = [result.token_id for result in results]
    assert all(token is not None for token in tokens)
    return [token for token in tokens if token is not None]


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        allowed_token_ids=params.allowed_token_ids,
    )


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_follow_the_distribution(name: str) -> None:
    print(f"seed {SEED}")
    logits = torch.randn(12, generator=torch.Generator().manual_seed(SEED)) * 1.5
    expected = expected_distribution(logits.numpy(), PARAMS[name])
    draws = 6000
    tokens = draw(
        logits.expand(draws, -1), [with_seed(PARAMS[name], SEED + i) for i in range(draws)]
    )
    counts = np.bincount(tokens, minlength=12)
    assert set(np.flatnonzero(counts)) <= set(expected)
    statistic = sum(
        (counts[token] - draws * share) ** 2 / (draws * share) for token, share in expected.items()
    )
    freedom = len(expected) - 1
    # Wilson and Hilferty: exceeded once in about 10,000 seeds.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.7 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


@pytest.mark.parametrize("vocabulary", [40, 700, 3000])
def test_each_token_is_the_inverse_of_its_own_distribution(vocabulary: int) -> None:
    """Also where the kept tokens outgrow the first and the second window."""
    generator = torch.Generator().manual_seed(SEED)
    rows = 60
    spread = torch.linspace(0.05, 5, rows).unsqueeze(1)
    logits = torch.randn(rows, vocabulary, generator=generator) * spread
    choices = [
        *PARAMS.values(),
        SamplingParams(top_p=0.97),
        SamplingParams(top_k=64),
        SamplingParams(top_k=65, min_p=0.02),
        SamplingParams(top_k=1500, top_p=0.95),
        SamplingParams(top_p=0.999, min_p=0.3),
    ]
    params = [with_seed(choices[i % len(choices)], i) for i in range(rows)]
    tokens = draw(logits, params, position=5)
    for i, token in enumerate(tokens):
        expected = expected_distribution(logits[i].numpy(), params[i])
        uniform = uniforms([i], [5])[0]
        cumulative = np.cumsum(list(expected.values()))
        position = list(expected).index(token)
        below = cumulative[position - 1] if position else 0.0
        assert below - 1e-5 <= uniform <= cumulative[position] + 1e-5


def test_a_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(SEED)
    rows = 48
    logits = torch.randn(rows, 3000, generator=generator) * torch.linspace(0.1, 4, rows)[:, None]
    choices = [*PARAMS.values(), SamplingParams(temperature=0.0), SamplingParams(top_p=0.99)]
    params = [with_seed(choices[i % len(choices)], i) for i in range(rows)]
    together = draw(logits, params)
    alone = [draw(logits[i : i + 1], [params[i]])[0] for i in range(rows)]
    order = torch.randperm(rows, generator=generator).tolist()
    shuffled = draw(logits[order], [params[i] for i in order])
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(3, 500)
    logits[1, [300, 7, 450]] = 2.0
    logits[2, 499] = 1.0
    assert draw(logits, [SamplingParams(temperature=0.0)] * 3) == [0, 7, 499]


@pytest.mark.parametrize(("vocabulary", "top_k"), [(50, 3), (3000, 3), (3000, 64), (3000, 1024)])
def test_equal_tokens_at_the_edge_of_top_k_go_by_id(vocabulary: int, top_k: int) -> None:
    logits = torch.zeros(2000, vocabulary)
    tokens = draw(logits, [SamplingParams(top_k=top_k, seed=i) for i in range(2000)])
    assert max(tokens) < top_k
    assert len(set(tokens)) > 0.8 * min(top_k, 2000 * (1 - math.exp(-2000 / top_k)))


def test_equal_tokens_at_the_edge_of_top_p_go_by_id() -> None:
    logits = torch.zeros(500, 3000)
    logits[:, 2999] = 1.0
    tokens = draw(logits, [SamplingParams(top_p=0.5, seed=i) for i in range(500)])
    assert max(token for token in tokens if token != 2999) < 1501
    assert max(token for token in tokens if token != 2999) > 1400


def test_a_tiny_temperature_is_greedy_and_never_nan() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(SEED)) * 30
    params = [SamplingParams(temperature=1e-40, top_p=0.5 if i % 2 else 1.0) for i in range(50)]
    assert draw(logits, params) == logits.argmax(dim=1).tolist()


def test_only_allowed_tokens_are_chosen_but_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0]]).expand(2, -1)
    params = SamplingParams(temperature=0.0, allowed_token_ids=(0, 3))
    hot = SamplingParams(temperature=50.0, allowed_token_ids=(0, 1), seed=2)
    first, second = sample(logits, [SampleRow(params, 0, logprobs=1), SampleRow(hot, 0)])
    assert first.token_id == 3
    assert second.token_id in (0, 1)
    assert first.logprobs is not None
    assert first.logprobs.ranks == [2]
    assert first.logprobs.top_token_ids == [2]
    expected = torch.log_softmax(logits[0], dim=0)
    assert first.logprobs.chosen == [pytest.approx(float(expected[3]))]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_row_without_finite_logits_fails_alone(bad: float | None) -> None:
    logits = torch.zeros(3, 20)
    if bad is None:
        logits[1] = float("-inf")
    else:
        logits[1, 4] = bad
    rows = [SampleRow(SamplingParams(top_p=0.9, seed=1), 3, logprobs=2)] * 3
    first, second, third = sample(logits, rows)
    assert second.token_id is None
    assert second.error is not None
    assert "position 3" in second.error
    assert first.error is None
    assert first == third
    assert first.logprobs is not None


def test_logprobs_ranks_and_best_tokens() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    expected = torch.log_softmax(logits, dim=-1)
    first, second = token_logprobs(logits, torch.tensor([4, 3]), [2, 4])
    assert (first.ranks, second.ranks) == ([3], [2])
    assert first.chosen == [pytest.approx(float(expected[0, 4]))]
    assert (first.top_n, first.top_token_ids) == (2, [1, 2])
    assert (second.top_n, second.top_token_ids) == (4, [4, 0, 1, 2])
    assert second.top_logprobs == pytest.approx(
        [float(expected[1, 4])] + [float(expected[1, 0])] * 3
    )


def test_no_alternatives_still_gives_the_chosen_tokens_logprob() -> None:
    (only,) = token_logprobs(torch.zeros(1, 8), torch.tensor([5]), [0])
    assert (only.top_n, only.top_token_ids, only.top_logprobs) == (0, [], [])
    assert only.chosen == [pytest.approx(-math.log(8))]


def test_ordered_topk_equals_a_full_stable_sort() -> None:
    generator = torch.Generator().manual_seed(SEED)
    # Few distinct values: nearly every edge is tied.
    values = torch.randint(0, 6, (40, 200), generator=generator).float()
    values[3, 50:] = float("-inf")
    for k in (1, 7, 64, 199, 200):
        top, ids = ordered_topk(values, k)
        full, order = values.sort(dim=-1, descending=True, stable=True)
        finite = torch.isfinite(full[:, :k])
        assert torch.equal(top, full[:, :k])
        assert torch.equal(ids[finite], order[:, :k][finite])
