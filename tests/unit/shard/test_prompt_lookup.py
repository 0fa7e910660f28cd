"""Drafts: what follows where the last tokens were before, and what is learned from being wrong."""

from __future__ import annotations

import numpy as np
import pytest
from support.budget import budget, seeded
from support.engines import make_sequence

from penstock_shard.spec_decode.prompt_lookup import Drafter, look_up


def _looked_up(ids, most: int) -> list[int]:
    return look_up(np.array(ids, dtype=np.int32), most)


@pytest.mark.parametrize(
    ("ids", "most", "expected"),
    [
        ([], 4, []),
        ([5], 4, []),
        ([1, 2, 3], 4, []),
        # Three tokens agree at the first place, one at the second.
        ([1, 2, 3, 10, 11, 3, 20, 1, 2, 3], 2, [10, 11]),
        # Two agree at the first place, one at the second.
        ([2, 3, 10, 11, 3, 20, 9, 2, 3], 2, [10, 11]),
        # Of equal places the last one.
        ([2, 3, 10, 2, 3, 20, 9, 2, 3], 2, [20, 9]),
        # What begins a sequence has nothing before it that could agree.
        ([3, 10, 7, 8, 3], 2, [10, 7]),
        # A repetition goes on.
        ([7, 7], 3, [7, 7, 7]),
        ([1, 2, 3, 1, 2, 3], 7, [1, 2, 3, 1, 2, 3, 1]),
    ],
)
def test_what_followed_the_longest_and_latest_match_is_drafted(
    ids: list[int], most: int, expected: list[int]
) -> None:
    assert _looked_up(ids, most) == expected


def test_a_draft_is_that_of_a_search_place_by_place() -> None:
    rng = seeded("drafts")
    for _ in range(budget(300, 20_000)):
        ids = [rng.randrange(4) for _ in range(rng.randint(0, 30))]
        most = rng.randint(1, 6)
        assert _looked_up(ids, most) == _by_search(ids, most)


def _by_search(ids: list[int], most: int) -> list[int]:
    for length in (3, 2, 1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[len(ids) - length :]:
                whole = list(ids)
                while len(whole) < len(ids) + most:
                    whole.append(whole[end - len(ids) + len(whole)])
                return whole[len(ids) :]
    return []


def test_only_so_many_tokens_back_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_shard.spec_decode.prompt_lookup._WINDOW", 4)
    assert _looked_up([7, 8, 1, 2, 7], 1) == []
    assert _looked_up([8, 7, 1, 7], 1) == [1]


def test_right_drafts_grow_and_wrong_ones_shrink_and_pause() -> None:
    drafter = Drafter(8)
    sequence = make_sequence(prompt=[1, 2, 3] * 10)
    assert len(drafter.propose(sequence, 8)) == 8
    drafter.learn(sequence, 8, 2)
    assert len(drafter.propose(sequence, 8)) == 2
    drafter.learn(sequence, 2, 2)
    assert len(drafter.propose(sequence, 8)) == 4
    assert len(drafter.propose(sequence, 3)) == 3
    pauses = []
    for _ in range(8):
        drafter.learn(sequence, 1, 0)
        pauses.append(0)
        while not drafter.propose(sequence, 8):
            sequence.token_ids.append([1, 2, 3][len(sequence.token_ids) % 3])
            pauses[-1] += 1
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64]
    assert len(drafter.propose(sequence, 8)) == 1
    drafter.learn(sequence, 1, 1)
    assert len(drafter.propose(sequence, 8)) == 2
    assert (drafter.proposed_total, drafter.accepted_total) == (8 + 2 + 8 + 1, 2 + 2 + 1)


def test_who_waited_for_a_draft_that_did_not_come_waits_less_often() -> None:
    drafter = Drafter(4)
    sequence = make_sequence(prompt=[1, 2, 1])
    sequence.num_pending = 1
    assert drafter.expects(sequence)
    sequence.num_pending = 0
    sequence.token_ids.append(9)
    assert drafter.propose(sequence, 4) == []
    sequence.token_ids.append(1)
    assert not drafter.expects(sequence)
    sequence.token_ids.append(2)
    assert drafter.expects(sequence)


def test_where_nobody_waited_a_draft_is_made_as_soon_as_there_is_one() -> None:
    drafter = Drafter(4)
    sequence = make_sequence(prompt=[1, 2, 3])
    assert drafter.propose(sequence, 4) == []
    sequence.token_ids.append(2)
    assert drafter.propose(sequence, 1) == [3]


def test_nothing_is_kept_of_a_request_that_is_over() -> None:
    drafter = Drafter(4)
    sequence = make_sequence(prompt=[1, 1])
    drafter.propose(sequence, 4)
    drafter.forget(sequence)
    drafter.learn(sequence, 4, 0)
    assert not drafter._histories
