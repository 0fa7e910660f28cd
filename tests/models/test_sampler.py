"""Tokens are drawn from the stated distribution: each filter, penalty and ban, alone and mixed."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from models.drawer import Drawer, SampleRow
from models.sampling_reference import (
    KINDS,
    OUTPUT,
    PROMPT,
    adjusted_scores,
    distribution,
    sampling_request,
)
from support.budget import budget, in_soak, seeded
from support.engines import changed

from penstock_shard.sequence import Sequence
from penstock_shard.worker.sampling.philox import uniforms
from penstock_shard.worker.sampling.top_k_top_p import ordered_topk, pick

SEED = 20_261_121
VOCABULARY = 24


def _seeds(sequence: Sequence, count: int) -> list[Sequence]:
    """The same request with seeds of its own."""
    return [
        changed(sequence, sampling=dataclasses.replace(sequence.request.sampling, seed=SEED + i))
        for i in range(count)
    ]


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    results = Drawer().sample(logits, [SampleRow(r, r.num_output_tokens) for r in sequences])
    tokens = [result.token_id for result in results]
    assert all(token is not None for token in tokens)
    return [token for token in tokens if token is not None]


def _chi_square_bound(freedom: int) -> float:
    """Exceeded once in about 10,000 seeds (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.7 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    ("kind", "quantised"),
    # Equal logits in each third kind only; the soak has them in all.
    [
        (kind, quantised) if number % 3 == 0 or not quantised else in_soak(kind, quantised)
        for number, kind in enumerate(KINDS)
        for quantised in (False, True)
    ],
)
def test_tokens_follow_the_distribution(kind: str, quantised: bool) -> None:
    print(f"seed {SEED}")
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(SEED)) * 1.5
    if quantised:
        logits = torch.round(logits)
    sequence = sampling_request(PROMPT, OUTPUT, **KINDS[kind])
    expected = distribution(logits.numpy(), sequence)
    assert len(expected) > 2
    draws = budget(2_000, 100_000)
    tokens: list[int] = []
    sequences = _seeds(sequence, draws)
    for start in range(0, draws, 2000):
        tokens += _draw(logits.expand(2000, -1), sequences[start : start + 2000])
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert set(np.flatnonzero(counts)) <= set(expected)
    # Tokens that are expected less than five times are counted together with the likeliest.
    best = max(expected, key=lambda token: expected[token])
    rare = {token for token, share in expected.items() if draws * share < 5}
    statistic = 0.0
    for token in expected.keys() - rare:
        group = [token, *rare] if token == best else [token]
        share = sum(expected[member] for member in group)
        statistic += (counts[group].sum() - draws * share) ** 2 / (draws * share)
    assert statistic < _chi_square_bound(len(expected) - len(rare) - 1)


def test_each_kind_changes_the_distribution() -> None:
    """Else the test above could not see it lost."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(SEED)) * 1.5
    plain = distribution(logits.numpy(), sampling_request(PROMPT, OUTPUT))
    for kind, fields in KINDS.items():
        found = distribution(logits.numpy(), sampling_request(PROMPT, OUTPUT, **fields))
        differences = [abs(found.get(i, 0) - plain.get(i, 0)) for i in range(VOCABULARY)]
        assert kind == "plain" or max(differences) > 0.03, kind


def _random_fields(rng: random.Random, vocabulary: int) -> dict[str, Any]:
    """Return random fields of a request: a seed, stop ids, and each other parameter less often than
    not.
    """

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, most)))

    fields: dict[str, Any] = {
        "temperature": lambda: rng.choice([0.0, 0.3, 0.8, 2.0, 8.0]),
        "top_k": lambda: rng.choice([1, 3, 40, 1024, 1025, 10**6]),
        "top_p": lambda: rng.choice([0.01, 0.5, 0.9, 0.99]),
        "min_p": lambda: rng.choice([0.001, 0.1, 0.5, 1.0]),
        "typical_p": lambda: rng.choice([0.01, 0.3, 0.8, 0.99]),
        "repetition_penalty": lambda: rng.choice([0.3, 1.1, 3.0]),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "logit_bias": lambda: tuple((i, rng.uniform(-9, 9)) for i in sorted(set(ids(9)))),
        "bad_words": lambda: tuple(ids(3) for _ in range(5)),
        "allowed_token_ids": lambda: ids(vocabulary // 2),
        "min_tokens": lambda: rng.randint(1, 12),
    }
    chosen = {name: make() for name, make in fields.items() if rng.random() < 0.3}
    return {**chosen, "stop_token_ids": ids(3), "seed": rng.getrandbits(64)}


def test_each_token_is_the_inverse_of_its_own_distribution() -> None:
    """Rows have any mix of parameters, in any vocabulary, within and beyond the first window."""
    rng = seeded("inverse")
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    for vocabulary in rng.choices([5, 33, 700, 1024, 1025, 3001], k=budget(20, 600)):
        sequences = [
            sampling_request(
                rng.choices(range(vocabulary), k=rng.randint(1, 20)),
                rng.choices(range(vocabulary), k=rng.randint(0, 20)),
                **_random_fields(rng, vocabulary),
            )
            for _ in range(8)
        ]
        spread = torch.tensor([rng.choice([0.0, 0.1, 1.0, 6.0]) for _ in sequences])
        logits = torch.randn(len(sequences), vocabulary, generator=generator) * spread[:, None]
        if rng.random() < 0.4:
            # Ties nearly everywhere.
            logits = torch.round(logits * 2) / 2
        rows = [SampleRow(sequence, sequence.num_output_tokens) for sequence in sequences]
        for row, own, result in zip(rows, logits, Drawer().sample(logits, rows), strict=True):
            _check_inverse(own, row, result.token_id)


def _check_inverse(logits: torch.Tensor, row: SampleRow, token: int | None) -> None:
    params = row.sequence.request.sampling
    if token is None:
        assert not np.isfinite(adjusted_scores(logits.numpy(), row.sequence)).any()
        return
    uniform = uniforms([params.seed], [row.position])[0]
    # Where a share ends exactly between two tokens, rounding decides which of them is the last.
    shares = [1.0, 1 + 1e-5, 1 - 1e-5]
    found = []
    for top, typical in [(a, b) for a in shares for b in shares]:
        nearly = dataclasses.replace(
            params,
            top_p=params.top_p * top if params.top_p < 1 else 1.0,
            typical_p=params.typical_p * typical if params.typical_p < 1 else 1.0,
        )
        expected = distribution(logits.numpy(), changed(row.sequence, sampling=nearly))
        if token in expected:
            place = list(expected).index(token)
            cumulative = np.cumsum(list(expected.values()))
            below = cumulative[place - 1] if place else 0.0
            found.append((below, uniform, cumulative[place]))
            if below - 1e-5 <= uniform <= cumulative[place] + 1e-5:
                return
    raise AssertionError(f"token {token}: {found}, {params}")


@pytest.mark.parametrize("kind", ["plain", "top_k", "top_p", "typical_p"])
def test_the_ends_of_the_unit_interval_are_the_first_and_the_last_token(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**KINDS[kind], "allowed_token_ids": (4, 6, 9)}
    logits = torch.tensor([[0.1, 0.2] * 6])
    first, *_, last = distribution(logits[0].numpy(), sampling_request(**fields))
    for uniform, expected in ((0.0, first), (1 - 2.0**-53, last)):
        monkeypatch.setattr(
            "penstock_shard.worker.sampling.sampler.uniforms",
            lambda _, positions, u=uniform: np.full(len(positions), u),
        )
        assert _draw(logits, [sampling_request(**fields)]) == [expected]


def test_no_uniform_number_points_past_the_last_token() -> None:
    rng = seeded("totals")
    totals = [2 ** rng.randint(1, 62) + rng.randint(-1, 2**20) for _ in range(2000)]
    total = torch.tensor([[max(1, total)] for total in totals])
    greatest = torch.tensor([[1 - 2.0**-53]], dtype=torch.float64).expand(len(totals), 1)
    assert not pick(total, total, greatest).any()


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(3, 500)
    logits[1, [300, 7, 450]] = 2.0
    logits[2, 499] = 1.0
    assert _draw(logits, [sampling_request(temperature=0.0)] * 3) == [0, 7, 499]


@pytest.mark.parametrize(("vocabulary", "top_k"), [(50, 3), (3000, 3), (3000, 1024), (3000, 1500)])
def test_equal_tokens_at_the_edge_of_top_k_go_by_id(vocabulary: int, top_k: int) -> None:
    tokens = _draw(torch.zeros(2000, vocabulary), _seeds(sampling_request(top_k=top_k), 2000))
    assert max(tokens) < top_k
    assert len(set(tokens)) > 0.9 * top_k * (1 - math.exp(-2000 / top_k))


def test_equal_tokens_at_the_edge_of_top_p_go_by_id() -> None:
    logits = torch.zeros(500, 3000)
    logits[:, 2999] = 1.0
    tokens = _draw(logits, _seeds(sampling_request(top_p=0.5), 500))
    others = [token for token in tokens if token != 2999]
    assert 1400 < max(others) < 1501


def test_equal_tokens_at_the_edge_of_typical_p_go_by_id() -> None:
    # The mean is nearer to the 2000 equal tokens than to the likelier one.
    logits = torch.zeros(500, 2001)
    logits[:, 2000] = 3.0
    tokens = _draw(logits, _seeds(sampling_request(typical_p=0.5), 500))
    assert 900 < max(tokens) < 1011


def test_negative_zero_equals_zero() -> None:
    logits = torch.zeros(500, 40)
    logits[:, ::2] = -0.0
    assert max(_draw(logits, _seeds(sampling_request(top_k=3), 500))) == 2


def test_a_tiny_temperature_is_greedy_and_never_nan() -> None:
    logits = torch.randn(60, 300, generator=torch.Generator().manual_seed(SEED)) * 30
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"typical_p": 0.5}]
    sequences = [sampling_request(temperature=1e-40, **kinds[i % 3]) for i in range(60)]
    assert _draw(logits, sequences) == logits.argmax(dim=1).tolist()


def test_huge_logits_and_penalties_stay_in_bounds() -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0, 0.0]]).expand(4, -1)
    fields: list[dict[str, Any]] = [
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 3e38, "temperature": 0.0},
        {"typical_p": 0.9},
        {"top_p": 0.9, "frequency_penalty": -2.0},
    ]
    sequences = [sampling_request([0, 1], [0], **each) for each in fields]
    assert _draw(logits, sequences) == [0, 0, 0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_row_without_finite_logits_ends_alone(bad: float | None) -> None:
    logits = torch.zeros(3, 20)
    if bad is None:
        logits[1] = float("-inf")
    else:
        logits[1, 4] = bad
    sequence = sampling_request((1,), (2, 2, 2), top_p=0.9, frequency_penalty=1.0, logprobs=2)
    first, second, third = Drawer().sample(logits, [SampleRow(r, 3) for r in _seeds(sequence, 3)])
    assert second.token_id is None
    assert second.logprobs is None
    assert second.error == "the model gave no finite logits at output position 3"
    for other in (first, third):
        assert other.error is None
        assert other.token_id is not None
        assert other.logprobs is not None


def test_a_row_with_nothing_left_to_draw_ends_alone() -> None:
    nothing = sampling_request(
        (1,), (2, 3), allowed_token_ids=(4, 5), bad_words=((3, 4),), min_tokens=9,
        stop_token_ids=(5,),
    )  # fmt: skip
    logits = torch.zeros(2, 20)
    bad, good = Drawer().sample(logits, [SampleRow(nothing, 2), SampleRow(sampling_request(), 0)])
    assert bad.token_id is None
    assert bad.error == "the sampling parameters leave no token to draw at output position 2"
    assert good.error is None


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    fields: list[dict[str, Any]] = [{}, {"repetition_penalty": 2.0}, {"typical_p": 0.5}]
    _draw(logits, [sampling_request((1, 2), (3,), **each) for each in fields])
    assert torch.equal(logits, before)


def test_half_precision_logits_are_drawn_as_the_floats_they_are() -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(SEED)).bfloat16() * 4
    sequences = _seeds(sampling_request(top_p=0.9), 40)
    assert _draw(logits, sequences) == _draw(logits.float(), sequences)


def test_ordered_topk_equals_a_full_stable_sort() -> None:
    generator = torch.Generator().manual_seed(SEED)
    # Few distinct values: nearly every edge is tied.
    values = -torch.randint(0, 6, (40, 200), generator=generator).float()
    values[3, 50:] = float("-inf")
    values[4] *= 1e-38
    for k in (1, 7, 64, 199, 200):
        order = values.sort(dim=-1, descending=True, stable=True).indices
        assert torch.equal(ordered_topk(values, k), order[:, :k])
