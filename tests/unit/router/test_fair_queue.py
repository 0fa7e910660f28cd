"""The order in which keys get places."""

from __future__ import annotations

import time

from support.budget import budget, seeded

from penstock_router.admission.fair_queue import FairQueue, Share, Waiting


def place(queue: FairQueue, request: Waiting) -> None:
    request.share.in_flight += request.places
    queue.remove(request)


def release(queue: FairQueue, request: Waiting) -> None:
    request.share.in_flight -= request.places
    queue.update(request.share)


def line_up(queue: FairQueue, *requests: Waiting) -> None:
    for request in requests:
        queue.add(request)


def test_one_key_is_served_in_the_order_of_arrival() -> None:
    queue, share = FairQueue(), Share()
    requests = [Waiting(share, places) for places in (1, 3, 1)]
    line_up(queue, *requests)
    for request in requests:
        assert queue.first() is request
        place(queue, request)
    assert queue.first() is None


def test_the_key_with_the_fewest_places_goes_first_and_equals_by_arrival() -> None:
    queue = FairQueue()
    greedy, polite, other = Share(in_flight=5), Share(in_flight=1), Share(in_flight=1)
    requests = [Waiting(share, 1) for share in (greedy, other, polite, polite)]
    line_up(queue, *requests)
    order = []
    while (request := queue.first()) is not None:
        order.append(requests.index(request))
        place(queue, request)
    assert order == [1, 2, 3, 0]


def test_places_that_come_free_move_a_key_up() -> None:
    queue = FairQueue()
    one, two = Share(in_flight=3), Share(in_flight=2)
    running, first, second = Waiting(one, 2), Waiting(one, 1), Waiting(two, 1)
    line_up(queue, first, second)
    release(queue, running)
    assert queue.first() is first


def test_a_wide_request_keeps_its_turn_whoever_has_fewer_by_then() -> None:
    queue = FairQueue()
    wide = Waiting(Share(in_flight=2), 16)
    queue.add(wide)
    assert queue.first() is wide
    queue.add(Waiting(Share(), 1))
    assert queue.first() is wide
    queue.remove(wide)
    narrow = queue.first()
    assert narrow is not None
    assert narrow.places == 1


def test_a_key_at_its_bound_is_passed_over_until_it_has_room() -> None:
    queue = FairQueue()
    full, other = Share(in_flight=4, max_places=4), Share(in_flight=9, max_places=4)
    running, waiting = Waiting(full, 1), Waiting(full, 1)
    queue.add(waiting)
    assert queue.first() is None
    queue.add(Waiting(other, 1))
    assert queue.first() is None
    release(queue, running)
    assert queue.first() is waiting


def test_who_gives_up_is_forgotten_wherever_it_stands() -> None:
    queue, share = FairQueue(), Share()
    first, second, third = (Waiting(share, 1) for _ in range(3))
    line_up(queue, first, second, third)
    assert queue.first() is first
    queue.remove(second)
    queue.remove(first)
    assert queue.first() is third
    queue.remove(third)
    assert queue.first() is None


def test_whatever_happens_the_first_is_who_a_look_at_all_of_them_finds() -> None:
    rng = seeded("fair queue")
    for _ in range(budget(30, 500)):
        max_per_key = rng.choice([4, 1000])
        queue = FairQueue()
        shares = [Share(max_places=max_per_key) for _ in range(rng.randint(1, 9))]
        waiting: list[Waiting] = []
        running: list[Waiting] = []
        turn: Waiting | None = None
        for _ in range(300):
            action = rng.random()
            if action < 0.4:
                waiting.append(Waiting(rng.choice(shares), rng.choice([1, 1, 1, 4])))
                queue.add(waiting[-1])
            elif action < 0.55 and waiting:
                gone = waiting.pop(rng.randrange(len(waiting)))
                queue.remove(gone)
                turn = None if gone is turn else turn
            elif action < 0.75 and running:
                release(queue, running.pop(rng.randrange(len(running))))
            else:
                turn = turn or _expected(waiting, max_per_key)
                assert queue.first() is turn
                if turn is not None and rng.random() < 0.8:
                    place(queue, turn)
                    waiting.remove(turn)
                    running.append(turn)
                    turn = None
            assert len(queue._heap) <= 2 * len(shares) + 64


def _expected(waiting: list[Waiting], max_per_key: int) -> Waiting | None:
    heads: dict[int, Waiting] = {}
    for request in waiting:
        heads.setdefault(id(request.share), request)
    fitting = [one for one in heads.values() if one.share.in_flight + one.places <= max_per_key]
    return min(fitting, key=lambda one: (one.share.in_flight, one.number), default=None)


def test_a_key_that_moves_up_and_down_for_long_leaves_nothing_behind() -> None:
    queue, share = FairQueue(), Share()
    queue.add(Waiting(share, 1))
    for number in range(10_000):
        share.in_flight = number % 7
        queue.update(share)
    assert len(queue._heap) < 100


def test_a_choice_takes_microseconds_however_many_keys_wait() -> None:
    queue = FairQueue()
    for _ in range(10_000):
        queue.add(Waiting(Share(), 1))
    begin_s = time.process_time()
    for _ in range(10_000):
        first = queue.first()
        assert first is not None
        place(queue, first)
    assert (time.process_time() - begin_s) / 10_000 < 100e-6
