"""In which order clients get places for work on their images."""

from __future__ import annotations

import asyncio

import pytest

from penstock_router.errors import TooManyRequests
from penstock_router.images import turns
from penstock_router.images.turns import Turns


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


async def order_of(
    turns: Turns, clock: Clock, work: list[tuple[str, float]]
) -> list[tuple[str, float]]:
    """Who had a place when, of clients that all come now with work that takes so many seconds."""
    begun: list[tuple[str, float]] = []

    async def run(client: str, takes_s: float) -> None:
        async with turns.turn(client):
            begun.append((client, round(clock.now_s, 3)))
            clock.now_s += takes_s
            await asyncio.sleep(0)

    await asyncio.gather(*(run(*each) for each in work))
    return begun


async def test_clients_share_a_place_by_time(clock: Clock) -> None:
    work = [("slow", 10.0)] * 3 + [("quick", 0.5)] * 10
    begun = await order_of(Turns(1, "x"), clock, work)
    # The slow one's second image comes after all that the quick one does in ten seconds.
    assert [client for client, _ in begun] == ["slow", *["quick"] * 10, "slow", "slow"]


async def test_those_whose_work_takes_as_long_take_turns(clock: Clock) -> None:
    work = [("a", 1.0)] * 4 + [("b", 1.0)] * 4
    begun = await order_of(Turns(1, "x"), clock, work)
    assert [client for client, _ in begun] == ["a", "b"] * 4


async def test_who_was_away_has_saved_up_nothing(clock: Clock) -> None:
    line = Turns(1, "x")
    await order_of(line, clock, [("a", 100.0), ("a", 1.0)])
    begun = await order_of(line, clock, [("a", 1.0)] * 3 + [("b", 1.0)] * 3)
    assert [client for client, _ in begun] == ["a", "b"] * 3
    assert line._clients == {}


async def test_of_several_places_one_client_does_not_get_the_next_ones_too(clock: Clock) -> None:
    line, ends = Turns(2, "x"), asyncio.Event()
    begun: list[str] = []

    async def run(client: str) -> None:
        async with line.turn(client):
            begun.append(client)
            await ends.wait()

    tasks = [asyncio.create_task(run(client)) for client in ("a", "a", "a", "a", "b")]
    await settled()
    assert begun == ["a", "a"]
    clock.now_s += 1
    ends.set()
    await asyncio.gather(*tasks)
    assert begun[2:] == ["b", "a", "a"]
    assert line.num_free == 2


@pytest.mark.parametrize("left", ["before", "just before", "just after"])
async def test_a_place_whose_client_left_goes_to_the_next(left: str) -> None:
    line = Turns(1, "x")
    first = line.turn("a")
    await first.__aenter__()
    leaves, stays = (asyncio.create_task(take(line, name)) for name in ("b", "c"))
    await settled()
    # Before its place comes free, or in the same turn of the event loop.
    if left == "just after":
        await first.__aexit__(None, None, None)
    leaves.cancel()
    if left == "before":
        await settled()
    if left != "just after":
        await first.__aexit__(None, None, None)
    assert await asyncio.wait_for(stays, 5) == "c"
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert (line.num_free, line._clients) == (1, {})


async def take(line: Turns, client: str) -> str:
    async with line.turn(client):
        return client


async def test_a_client_waits_for_at_most_as_many_as_others_still_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "_MAX_WAITING", 8)
    line = Turns(1, "seen")
    async with line.turn("first"):
        tasks = [asyncio.create_task(take(line, "greedy")) for _ in range(10)]
        await settled()
        refused = [task for task in tasks if task.done()]
        assert len(refused) == 6
        with pytest.raises(TooManyRequests, match="too many images wait to be seen"):
            await refused[0]
        other = asyncio.create_task(take(line, "other"))
        await settled()
        assert not other.done()
    await asyncio.gather(other, *tasks, return_exceptions=True)
    assert (line.num_free, line._waiting.held, line._clients) == (1, 0, {})
