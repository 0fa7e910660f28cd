"""Memory that clients share: who may hold how much."""

from __future__ import annotations

import random

import pytest

from penstock_router.admission.shared_budget import Holding, SharedBudget


class Refused(Exception):
    def __init__(self, held: int, total: int) -> None:
        super().__init__(held, total)


def test_a_client_may_hold_as_much_as_is_left_free() -> None:
    budget = SharedBudget(100)
    first, second = budget.hold("greedy"), budget.hold("greedy")
    first.grow(30, Refused)
    second.grow(20, Refused)
    with pytest.raises(Refused) as refused:
        second.grow(1, Refused)
    assert refused.value.args == (50, 100)


def test_several_greedy_clients_leave_room_for_the_next() -> None:
    budget = SharedBudget(1000)
    for client in "abcd":
        while budget.allows(client, 1):
            budget.hold(client).grow(1, Refused)
    shares = [budget.held_by(client) for client in "abcd"]
    assert shares == [500, 250, 125, 62]
    budget.hold("late").grow(1, Refused)


def test_the_only_thing_here_may_have_any_size() -> None:
    budget = SharedBudget(10)
    body = budget.hold("a")
    body.grow(8, Refused)
    body.grow(80, Refused)
    with pytest.raises(Refused):
        budget.hold("b").grow(1, Refused)


def test_the_only_thing_of_a_client_may_take_all_that_is_free() -> None:
    budget = SharedBudget(100)
    budget.hold("a").grow(10, Refused)
    body = budget.hold("b")
    body.grow(60, Refused)
    body.grow(30, Refused)
    with pytest.raises(Refused):
        body.grow(1, Refused)


def test_what_is_held_is_given_back_at_the_end_of_its_scope() -> None:
    budget = SharedBudget(100)
    with budget.hold("a") as holding:
        holding.grow(10, Refused)
        holding.shrink(3)
        assert (budget.held, budget.held_by("a"), holding.amount) == (7, 7, 7)
    holding.close()
    assert (budget.held, budget.held_by("a")) == (0, 0)


def test_counts_are_right_whatever_happens() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    budget = SharedBudget(1000)
    holdings: list[tuple[str, list[Holding]]] = [(client, []) for client in "abc"]
    for _ in range(2000):
        client, held = rng.choice(holdings)
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held))).close()
            continue
        one = budget.hold(client)
        try:
            one.grow(rng.randrange(300), Refused)
        except Refused:
            assert one.amount == 0
        else:
            held.append(one)
        for name, all_held in holdings:
            assert budget.held_by(name) == sum(each.amount for each in all_held)
        assert budget.held == sum(budget.held_by(name) for name, _ in holdings)
        assert budget.held <= 1000
