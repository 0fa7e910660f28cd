"""The sampler's memory: it equals what the sampler would read, so a request goes on anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.drawer import Drawer, SampleRow
from models.sampling_reference import KINDS, sampling_request
from support.budget import budget

from penstock_shard.sequence import Sequence

VOCABULARY = 24
LENGTH = 40
# Of each position of the output; low enough that penalties and bad words decide much.
LOGITS = torch.randn(LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 0.7
PROMPT = [3, 7, 7, 11]


def _request(output: list[int], fields: dict[str, Any]) -> Sequence:
    return sampling_request(PROMPT, output, **{"seed": 11, **fields})


def _generate(sampler: Drawer, sequence: Sequence) -> list[int]:
    """The tokens up to LENGTH. The sequence itself need not have them."""
    tokens: list[int] = []
    start = sequence.num_output_tokens
    for position in range(start, LENGTH):
        (result,) = sampler.sample(LOGITS[position : position + 1], [SampleRow(sequence, position)])
        assert result.token_id is not None
        tokens.append(result.token_id)
    return tokens


BAD_WORDS = tuple((a, b) for a in range(0, VOCABULARY, 2) for b in range(12))
MANY: dict[str, dict[str, Any]] = {
    **{kind: dict(fields) for kind, fields in KINDS.items()},
    "many_bad_words": {"bad_words": (*BAD_WORDS, (13, 15, 17), (15,))},
    "greedy_penalties": {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "min_tokens_later": {"min_tokens": 30, "stop_token_ids": (1, 2, 3, 4, 5, 6)},
}


@pytest.mark.parametrize("kind", MANY)
def test_going_on_at_any_position_gives_the_same_tokens(kind: str) -> None:
    fields = MANY[kind]
    whole = _generate(Drawer(), _request([], fields))
    for cut in range(0, LENGTH, budget(7, 3)):
        rest = _generate(Drawer(), _request(whole[:cut], fields))
        assert whole[:cut] + rest == whole


@pytest.mark.parametrize("kind", ["repetition", "frequency", "many_bad_words"])
def test_the_output_so_far_decides_what_comes_next(kind: str) -> None:
    """Else the test above would hold for a sampler that forgets it."""
    fields = MANY[kind]
    whole = _generate(Drawer(), _request([], fields))
    differing = 0
    for cut in range(1, LENGTH):
        forgetful = sampling_request(PROMPT, (), **{"seed": 11, **fields})
        forgetful.token_ids.extend([0] * cut)
        (result,) = Drawer().sample(LOGITS[cut : cut + 1], [SampleRow(forgetful, cut)])
        differing += result.token_id != whole[cut]
    assert differing > 0


def test_bad_words_never_occur() -> None:
    fields = MANY["many_bad_words"]
    for seed in range(20):
        tokens = _generate(Drawer(), _request([], {**fields, "seed": seed}))
        for word in fields["bad_words"]:
            places = range(LENGTH - len(word) + 1)
            assert not any(tuple(tokens[i : i + len(word)]) == word for i in places)


def test_no_stop_id_comes_before_min_tokens_and_some_do_after() -> None:
    fields = MANY["min_tokens_later"]
    after: set[int] = set()
    for seed in range(20):
        tokens = _generate(Drawer(), _request([], {**fields, "seed": seed}))
        assert not set(tokens[:30]) & set(fields["stop_token_ids"])
        after.update(tokens[30:])
    assert after >= set(fields["stop_token_ids"])


def test_whoever_is_admitted_again_goes_on_with_the_tokens_that_it_has_then() -> None:
    sampler, sequence = Drawer(), _request([], MANY["greedy_penalties"])
    tokens = _generate(sampler, sequence)
    sequence.token_ids.extend(tokens[:20])
    sampler.admit(sequence)
    assert _generate(sampler, sequence) == tokens[20:]


def test_tokens_that_nobody_knows_are_an_error_of_ours() -> None:
    sampler, sequence = Drawer(), _request([], MANY["frequency"])
    sampler.sample(LOGITS[:1], [SampleRow(sequence, 0)])
    with pytest.raises(AssertionError, match="position 2 is to be drawn, but 1 output tokens"):
        sampler.sample(LOGITS[2:3], [SampleRow(sequence, 2)])


def test_after_an_error_the_step_that_was_launched_ahead_still_runs() -> None:
    sampler, sequence = Drawer(), _request([], MANY["frequency"])
    bad, fine = sampler.sample(
        torch.stack([LOGITS[0] * float("nan"), LOGITS[0]]),
        [SampleRow(sequence, 0), SampleRow(_request([], {}), 0)],
    )
    assert bad.error is not None
    assert fine.error is None
    (ahead,) = sampler.sample(LOGITS[1:2], [SampleRow(sequence, 1)])
    assert ahead.token_id is not None


def test_only_requests_that_need_it_are_remembered_until_they_are_over() -> None:
    sampler = Drawer()
    sequences = [_request([], dict(fields)) for fields in MANY.values()]
    rows = [SampleRow(sequence, 0) for sequence in sequences]
    sampler.sample(LOGITS[:1].expand(len(rows), -1), rows)
    filters = {"plain", "cold", "hot", "top_k", "top_p", "min_p", "typical_p", "filters"}
    assert len(sampler.sampler._shaping._states) == len(MANY.keys() - filters)
    for sequence in sequences:
        sampler.sampler.release(sampler.slots[sequence])
    assert not sampler.sampler._shaping._states


def test_two_requests_of_one_sampler_do_not_mix() -> None:
    names = ("repetition", "frequency", "many_bad_words", "everything")
    alone = [_generate(Drawer(), _request([], MANY[name])) for name in names]
    sampler = Drawer()
    sequences = [_request([], MANY[name]) for name in names]
    for position in range(LENGTH):
        rows = [SampleRow(sequence, position) for sequence in sequences]
        results = sampler.sample(LOGITS[position].expand(len(rows), -1), rows)
        for sequence, result in zip(sequences, results, strict=True):
            assert result.token_id is not None
            sequence.token_ids.append(result.token_id)
    assert [sequence.token_ids[len(PROMPT) :].tolist() for sequence in sequences] == alone


def test_a_repetition_penalty_counts_the_prompt_and_other_penalties_do_not() -> None:
    logits = torch.tensor([[1.0, 1.5, 0.0]])
    for name, expected in (
        ("repetition_penalty", 0),
        ("presence_penalty", 1),
        ("frequency_penalty", 1),
    ):
        fields: dict[str, Any] = {name: 2.0, "temperature": 0.0}
        sequence = sampling_request([1], **fields)
        assert Drawer().sample(logits, [SampleRow(sequence, 0)])[0].token_id == expected
        drawn_once = sampling_request([1], [1], **fields)
        assert Drawer().sample(logits, [SampleRow(drawn_once, 1)])[0].token_id == 0
