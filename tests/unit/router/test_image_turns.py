"""The order in which clients get places for their work, and how equal work on images is shared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock_router.admission import turns
from penstock_router.admission.turns import Place, Turns
from penstock_router.errors import TooManyRequests
from penstock_router.images import line as line_module
from penstock_router.images.line import Line


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(turns, "time", self)

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def turn(turns: Turns, *clients: str) -> AsyncIterator[Place]:
    place = await turns.take(clients)
    try:
        yield place
    finally:
        turns.give_back(place)


async def order_of(
    turns: Turns, clock: Clock, work: list[tuple[str, float]]
) -> list[tuple[str, float]]:
    """Return who got a place and when, if all clients come now with work of the given seconds."""
    begun: list[tuple[str, float]] = []

    async def run(client: str, takes_s: float) -> None:
        async with turn(turns, client):
            begun.append((client, round(clock.now_s, 3)))
            clock.now_s += takes_s
            await asyncio.sleep(0)

    await asyncio.gather(*(run(*each) for each in work))
    return begun


async def test_clients_share_a_place_by_time(clock: Clock) -> None:
    work = [("slow", 10.0)] * 3 + [("quick", 0.5)] * 10
    begun = await order_of(Turns(1), clock, work)
    # The slow one's second image comes after all that the quick one does in ten seconds.
    assert [client for client, _ in begun] == ["slow", *["quick"] * 10, "slow", "slow"]


async def test_those_whose_work_takes_as_long_take_turns(clock: Clock) -> None:
    work = [("a", 1.0)] * 4 + [("b", 1.0)] * 4
    begun = await order_of(Turns(1), clock, work)
    assert [client for client, _ in begun] == ["a", "b"] * 4


async def test_who_was_away_has_saved_up_nothing(clock: Clock) -> None:
    line = Turns(1)
    await order_of(line, clock, [("a", 100.0), ("a", 1.0)])
    begun = await order_of(line, clock, [("a", 1.0)] * 3 + [("b", 1.0)] * 3)
    assert [client for client, _ in begun] == ["a", "b"] * 3
    assert line._spent_s == {}


async def test_of_several_places_one_client_does_not_get_the_next_ones_too(clock: Clock) -> None:
    line, ends = Turns(2), asyncio.Event()
    begun: list[str] = []

    async def run(client: str) -> None:
        async with turn(line, client):
            begun.append(client)
            await ends.wait()

    tasks = [asyncio.create_task(run(client)) for client in ("a", "a", "a", "a", "b")]
    await settled()
    assert begun == ["a", "a"]
    clock.now_s += 1
    ends.set()
    await asyncio.gather(*tasks)
    assert begun[2:] == ["b", "a", "a"]
    assert line.num_working == 0


@pytest.mark.parametrize("left", ["before", "just before", "just after"])
async def test_a_place_whose_client_left_goes_to_the_next(left: str) -> None:
    line = Turns(1)
    first = await line.take(["a"])
    leaves, stays = (asyncio.create_task(take(line, name)) for name in ("b", "c"))
    await settled()
    # Before its place comes free, or in the same turn of the event loop.
    if left == "just after":
        line.give_back(first)
    leaves.cancel()
    if left == "before":
        await settled()
    if left != "just after":
        line.give_back(first)
    assert await asyncio.wait_for(stays, 5) == "c"
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert (line.num_working, line.num_waiting, line._spent_s) == (0, 0, {})


async def take(line: Turns, *clients: str) -> str:
    async with turn(line, *clients) as place:
        return place.client


async def test_what_work_has_taken_so_far_counts_while_it_runs(clock: Clock) -> None:
    line, begun = Turns(2), list[str]()
    slow = await line.take(["slow"])
    clock.now_s += 10
    quick = await line.take(["quick"])
    tasks = [asyncio.create_task(noted(line, begun, name, clock)) for name in ("slow", "quick")]
    await settled()
    clock.now_s += 1
    line.give_back(quick)
    await asyncio.gather(*tasks)
    assert begun == ["quick", "slow"]
    line.give_back(slow)


async def test_who_leaves_and_comes_back_still_owes_what_it_had_too_much(clock: Clock) -> None:
    line, begun = Turns(1), list[str]()
    first = await line.take(["slow"])
    tasks = [asyncio.create_task(noted(line, begun, "quick", clock)) for _ in range(5)]
    await settled()
    clock.now_s += 10
    line.give_back(first)
    # In the same moment as the others.
    tasks.append(asyncio.create_task(noted(line, begun, "slow", clock)))
    await asyncio.gather(*tasks)
    assert begun == [*["quick"] * 5, "slow"]


async def noted(line: Turns, begun: list[str], client: str, clock: Clock) -> None:
    async with turn(line, client):
        begun.append(client)
        clock.now_s += 0.2
        await asyncio.sleep(0)


async def test_of_one_clients_the_least_in_order_is_first() -> None:
    line, begun = Turns(1), list[int]()
    first = await line.take(["a"])

    async def run(order: int) -> None:
        place = await line.take(["a"], order)
        begun.append(order)
        line.give_back(place)

    tasks = [asyncio.create_task(run(order)) for order in (3, 1, 2)]
    await settled()
    line.give_back(first)
    await asyncio.gather(*tasks)
    assert begun == [1, 2, 3]


async def test_what_several_wait_for_comes_in_the_first_turn_of_any(clock: Clock) -> None:
    line, begun = Turns(1), list[str]()
    first = await line.take(["a"])
    clients = ["a"]
    tasks = [asyncio.create_task(noted(line, begun, "a", clock)) for _ in range(3)]
    shared = asyncio.create_task(line.take(clients))
    await settled()
    clients.append("b")
    clock.now_s += 1
    line.give_back(first)
    place = await shared
    assert (place.client, begun) == ("b", [])
    line.give_back(place)
    await asyncio.gather(*tasks)


# ---- places for others while one client's work is long -----------------------------------------


async def test_beside_long_work_there_is_a_place_for_others_and_none_for_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "LONG_S", 0.0)
    line = Turns(1, spare=1)
    long = await line.take(["a"])
    again = asyncio.create_task(line.take(["a"]))
    await asyncio.sleep(0.01)
    assert [long.is_long, again.done()] == [True, False]
    other = await asyncio.wait_for(line.take(["b"]), 5)
    third = asyncio.create_task(line.take(["c"]))
    # The spare one is taken too, though it is long as well.
    await asyncio.sleep(0.01)
    assert other.is_long
    assert [again.done(), third.done()] == [False, False]
    line.give_back(long)
    await settled()
    assert again.done() != third.done()
    line.give_back(other)
    for task in (again, third):
        line.give_back(await asyncio.wait_for(task, 5))
    assert (line.num_working, line._spent_s) == (0, {})


async def test_without_spare_places_others_wait_for_the_end_of_long_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "LONG_S", 0.0)
    line = Turns(1)
    long = await line.take(["a"])
    other = asyncio.create_task(line.take(["b"]))
    await asyncio.sleep(0.01)
    assert not other.done()
    line.give_back(long)
    line.give_back(await other)


# ---- equal work on images ----------------------------------------------------------------------


class Work:
    """Jobs that run until they may end; `begun` tells which began, and in whose turn."""

    def __init__(self) -> None:
        self.line = Line(1, "seen")
        self.begun: list[tuple[str, str]] = []
        self.may_end = asyncio.Event()
        self.refuses: set[str] = set()

    async def do(self, name: str, client: str) -> str:
        async def work(whose: str) -> str:
            self.begun.append((name, whose))
            if whose in self.refuses:
                raise TooManyRequests(f"{whose} has no memory left")
            await self.may_end.wait()
            return f"done for {whose}"

        return await self.line.do(name, work, client)

    def start(self, *pairs: tuple[str, str]) -> list[asyncio.Task[str]]:
        return [asyncio.create_task(self.do(*pair)) for pair in pairs]

    async def end(self, *tasks: asyncio.Task[str]) -> list[str | BaseException]:
        self.may_end.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert (self.line._jobs, self.line._waiting.held) == ({}, 0)
        assert self.line._turns.num_working == self.line._turns.num_waiting == 0
        return outcomes


async def test_who_wants_the_same_as_another_waits_its_own_turn_and_not_that_ones() -> None:
    work = Work()
    many = work.start(*((str(number), "many") for number in range(50)))
    await settled()
    one = work.start(("49", "one"))
    await settled()
    assert (await work.end(*one, *many))[0] == "done for one"
    assert work.begun[:2] == [("0", "many"), ("49", "one")]
    assert len(work.begun) == 50


async def test_equal_work_goes_on_for_the_others_when_who_began_leaves() -> None:
    work = Work()
    tasks = work.start(("0", "a"), ("1", "a"), ("1", "b"), ("1", "c"))
    await settled()
    tasks[1].cancel()
    tasks[2].cancel()
    await settled()
    assert (await work.end(*tasks))[3] == "done for c"
    assert work.begun == [("0", "a"), ("1", "c")]


async def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    work = Work()
    tasks = work.start(("0", "a"), ("1", "a"), ("1", "b"))
    await settled()
    for task in tasks[1:]:
        task.cancel()
    await work.end(*tasks)
    assert work.begun == [("0", "a")]


async def test_who_waits_too_long_is_refused_and_those_who_came_later_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Work()
    monkeypatch.setattr(line_module, "_MAX_WAIT_S", 0.05)
    tasks = work.start(("0", "a"), ("1", "a"))
    await settled()
    monkeypatch.setattr(line_module, "_MAX_WAIT_S", 60.0)
    tasks += work.start(("1", "b"))
    with pytest.raises(TooManyRequests, match="too many images wait to be seen"):
        await tasks[1]
    assert not tasks[2].done()
    assert (await work.end(*tasks))[2] == "done for b"


async def test_what_one_may_not_is_refused_to_that_one_and_done_for_the_other() -> None:
    work = Work()
    work.refuses.add("a")
    tasks = work.start(("0", "c"), ("1", "a"), ("1", "b"), ("1", "a"))
    await settled()
    _, refused, served, again = await work.end(*tasks)
    assert isinstance(refused, TooManyRequests)
    assert isinstance(again, TooManyRequests)
    assert served == "done for b"
    assert work.begun == [("0", "c"), ("1", "a"), ("1", "b")]


async def test_a_client_waits_for_at_most_as_many_as_others_still_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_module, "_MAX_WAITING", 8)
    work = Work()
    await asyncio.sleep(0)
    [first] = work.start(("first", "first"))
    await settled()
    tasks = work.start(*((str(number), "greedy") for number in range(10)))
    await settled()
    refused = [task for task in tasks if task.done()]
    assert len(refused) == 6
    with pytest.raises(TooManyRequests, match="too many images wait to be seen"):
        await refused[0]
    # The same again takes no further place, and no other's.
    others = work.start(("0", "greedy"), ("0", "other"))
    await settled()
    assert not any(other.done() for other in others)
    await work.end(first, *others, *tasks)
