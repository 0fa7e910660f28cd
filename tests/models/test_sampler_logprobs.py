"""Log-probabilities are of the raw logits, exact to 1e-4, ranked and listed by one rule."""

from __future__ import annotations

import math
from collections import abc

import pytest
import torch
from models.drawer import Drawer, SampleRow
from models.sampling_reference import sampling_request

from penstock_proto.types import Logprobs
from penstock_shard.worker.sampling import token_scores
from penstock_shard.worker.sampling.token_scores import score_tokens

SEED = 20_261_121


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: list[int],
    asked: abc.Sequence[abc.Sequence[int]] = (),
) -> list[Logprobs]:
    return score_tokens(logits, tokens, counts, asked).finish()


@pytest.mark.parametrize("vocabulary", [32_000, 150_000])
@pytest.mark.parametrize(
    ("scale", "offset"),
    [(0.0, 0.0), (1e-6, 0.0), (1.0, 0.0), (10.0, 1e4), (300.0, -1e4), (3.0, 1e-4)],
)
def test_they_are_those_of_float64(vocabulary: int, scale: float, offset: float) -> None:
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn(3, vocabulary, generator=generator) * scale + offset
    expected = torch.log_softmax(logits.double(), dim=1)
    tokens = torch.tensor([0, vocabulary - 1, int(logits[2].argmax())])
    asked = torch.randint(0, vocabulary, (200,), generator=generator).tolist()
    for i, found in enumerate(token_logprobs(logits, tokens, [20] * 3, [asked] * 3)):
        ids = [int(tokens[i]), *found.top_token_ids, *asked]
        values = [*found.chosen, *found.top_logprobs, *found.requested]
        for token, value in zip(ids, values, strict=True):
            # A float32 beyond 1000 has steps of 1e-4.
            assert value == pytest.approx(float(expected[i, token]), abs=1e-4, rel=1e-6)


def test_on_a_device_rows_begin_where_sums_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 33, generator=torch.Generator().manual_seed(SEED))
    tokens, asked = torch.tensor([0, 32, 5]), [[32, 0], [], [7]]
    expected = token_logprobs(logits, tokens, [33, 2, 0], asked)
    summed = torch.log_softmax

    def sum_up(rows: torch.Tensor, dim: int) -> torch.Tensor:
        assert all(row.data_ptr() % 16 == 0 for row in rows)
        return summed(rows, dim)

    monkeypatch.setattr(torch, "log_softmax", sum_up)
    monkeypatch.setattr(token_scores, "is_host", lambda _: False)
    for found, same in zip(
        token_logprobs(logits, tokens, [33, 2, 0], asked), expected, strict=True
    ):
        assert (found.ranks, found.top_token_ids) == (same.ranks, same.top_token_ids)
        for field in ("chosen", "top_logprobs", "requested"):
            assert getattr(found, field) == pytest.approx(getattr(same, field), abs=1e-6)


def test_ranks_and_best_tokens() -> None:
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
    assert first.requested == []


def test_the_chosen_token_has_the_very_value_it_has_in_the_lists() -> None:
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(SEED)) * 5
    tokens = logits.argmax(dim=1)
    columns = token_logprobs(logits, tokens, [1] * 50, [[token] for token in tokens.tolist()])
    for token, found in zip(tokens.tolist(), columns, strict=True):
        assert found.ranks == [1]
        assert found.top_token_ids == [token]
        assert found.chosen == found.top_logprobs == found.requested


def test_a_greedy_token_is_the_first_of_the_best_though_others_round_to_its_value() -> None:
    logits = torch.zeros(1, 150_000)
    logits[0, 77] = 0.01
    logits[0, 5] = torch.nextafter(logits[0, 77], torch.tensor(0.0))
    (found,) = token_logprobs(logits, logits.argmax(dim=1), [2])
    assert (found.ranks, found.top_token_ids) == ([1], [77, 5])
    assert found.top_logprobs[0] == found.top_logprobs[1]
    (found,) = token_logprobs(logits, torch.tensor([5]), [2])
    assert found.ranks == [2]


def test_equal_tokens_are_listed_by_id_and_share_a_rank() -> None:
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randint(-2, 2, (20, 700), generator=generator).float()
    order = logits.sort(dim=1, descending=True, stable=True).indices
    for i, found in enumerate(token_logprobs(logits, order[:, 400], [64] * 20)):
        assert found.top_token_ids == order[i, :64].tolist()
        assert found.ranks == [int((logits[i] > logits[i, order[i, 400]]).sum()) + 1]


def test_no_alternatives_still_give_the_chosen_tokens_value() -> None:
    (only,) = token_logprobs(torch.zeros(1, 8), torch.tensor([5]), [0])
    assert (only.top_n, only.top_token_ids, only.top_logprobs) == (0, [], [])
    assert only.chosen == [pytest.approx(-math.log(8))]


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    (only,) = token_logprobs(torch.zeros(1, 3), torch.tensor([1]), [20])
    assert (only.top_n, only.top_token_ids) == (3, [0, 1, 2])


def test_sampling_parameters_do_not_change_them() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0]])
    sequence = sampling_request(
        (2,), (2, 2), temperature=0.3, allowed_token_ids=(0, 3), bad_words=((0,),),
        frequency_penalty=2.0, logit_bias=((2, 50.0),), logprobs=1, logprob_token_ids=(2, 0),
    )  # fmt: skip
    (result,) = Drawer().sample(logits, [SampleRow(sequence, 2)])
    expected = torch.log_softmax(logits[0], dim=0).tolist()
    assert result.token_id == 3
    assert result.logprobs is not None
    assert result.logprobs.ranks == [2]
    assert result.logprobs.top_token_ids == [2]
    assert result.logprobs.chosen == [pytest.approx(expected[3])]
    assert result.logprobs.requested == pytest.approx([expected[2], expected[0]])


def test_only_rows_that_ask_have_them() -> None:
    sequences = [sampling_request(logprobs=n) for n in (None, 0, 2)]
    results = Drawer().sample(torch.zeros(3, 9), [SampleRow(r, 0) for r in sequences])
    found = [
        None if result.logprobs is None else len(result.logprobs.top_token_ids)
        for result in results
    ]
    assert found == [None, 0, 2]


def test_rows_that_want_all_of_a_vocabulary_leave_others_as_they_are() -> None:
    vocabulary = 3000
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(3))
    wanted = [2, vocabulary, None, 20]
    sequences = [sampling_request(seed=i, logprobs=count) for i, count in enumerate(wanted)]
    rows = [SampleRow(sequence, 0) for sequence in sequences]
    together = Drawer().sample(logits, rows)
    for i, (row, found) in enumerate(zip(rows, together, strict=True)):
        (alone,) = Drawer().sample(logits[i : i + 1], [row])
        assert (found.token_id, found.logprobs) == (alone.token_id, alone.logprobs)
    whole = together[1].logprobs
    assert whole is not None
    assert whole.top_token_ids == logits[1].argsort(descending=True, stable=True).tolist()
    expected = torch.log_softmax(logits[1], dim=0)[whole.top_token_ids]
    assert whole.top_logprobs == pytest.approx(expected.tolist(), abs=1e-5)
