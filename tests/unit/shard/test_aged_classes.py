"""The order in which waiting requests of several classes get places when some have aged."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.engines import make_request

from penstock_proto.types import Objective
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.priority_policy import PriorityPolicy
from penstock_shard.scheduler.step_budget import StepBudget
from penstock_shard.scheduler.step_time import StepTime
from penstock_shard.sequence import Sequence, SequenceState

NOW_S = 100.0
AGED, FRESH = 1.0, 95.0


def waiting(name: str, priority: int, arrived_s: float, count: int) -> list[Sequence]:
    made = []
    for number in range(count):
        request = make_request(f"{name}{number}", max_tokens=100, objective=Objective(priority))
        sequence = Sequence.of(request, 0)
        sequence.arrived_s = arrived_s + number / 1000
        sequence.arrival = priority * 1000 + number
        made.append(sequence)
    return made


def places(
    *groups: list[Sequence], state: SequenceState = SequenceState.RUNNING, most: int = 100
) -> list[str]:
    """Return the ids of the requests that get places, in that order; `most` of them at most."""
    policy = PriorityPolicy(BlockManager([1000], 16), StepTime(), aging_s=30.0)
    all_ = [sequence for group in groups for sequence in group]
    for sequence in all_:
        policy.add(sequence)
    names = []
    for sequence in policy.queue(all_, StepBudget(100, StepTime(), prompt_tokens=100), NOW_S):
        sequence.state = state
        names.append(sequence.request.request_id)
        if len(names) == most:
            break
    return names


@pytest.mark.parametrize("state", [SequenceState.RUNNING, SequenceState.LOADING])
def test_who_has_aged_has_every_eighth_place_before_a_higher_class(state: SequenceState) -> None:
    names = places(waiting("low", 1, AGED, 5), waiting("up", 0, FRESH, 30), state=state)
    at = [place for place, name in enumerate(names) if name.startswith("low")]
    assert [later - earlier for earlier, later in pairwise(at)] == [8] * 4


def test_an_upper_request_that_has_aged_too_is_first_whatever_else_has() -> None:
    for others in (
        [waiting("low", 1, AGED, 50)],
        [waiting("lowest", 2, AGED, 10), waiting("middle", 1, FRESH, 90)],
    ):
        names = places(*others, waiting("up", 0, 5.0, 1))
        assert names.index("up0") <= 1
        assert sorted(names) == sorted({*names})


def test_aged_requests_of_the_upper_class_go_before_fresh_ones_of_the_lower() -> None:
    names = places(waiting("low", 1, FRESH, 5), waiting("up", 0, AGED, 5))
    assert names == [*(f"up{number}" for number in range(5)), *(f"low{n}" for n in range(5))]


def test_one_class_alternates_between_age_and_order() -> None:
    names = places(waiting("old", 0, AGED, 3), waiting("new", 0, FRESH, 3))
    assert names[:3] == ["old0", "old1", "old2"]


def test_who_has_a_long_prompt_to_compute_is_not_near_its_end() -> None:
    policy = PriorityPolicy(BlockManager([1000], 16), StepTime(), aging_s=30.0)
    request = make_request("long", list(range(5000)), max_tokens=8, objective=Objective(5))
    sequence = Sequence.of(request, 0)
    sequence.arrived_s = FRESH
    assert policy._may_be_put_down(sequence, NOW_S)
    sequence.num_computed = 5000
    assert not policy._may_be_put_down(sequence, NOW_S)
