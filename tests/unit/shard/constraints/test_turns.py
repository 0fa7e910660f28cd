"""The order in which those who wait for a place get one."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from penstock_shard.structured_output.turns import Turns


class _Waiting:
    """Tasks that wait for places. A task that has a place keeps it until told otherwise."""

    def __init__(self, num_places: int) -> None:
        self.turns = Turns(num_places)
        self.had: list[str] = []
        self.places: set[int] = set()
        self.callers: dict[str, list[Hashable]] = {}
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, *names: str) -> None:
        """Start a task for each name; the letters of the name are the callers that wait for it."""
        for name in names:
            self._leave[name] = asyncio.Event()
            self.callers[name] = [letter for letter in name if letter.isalpha()]
            self._tasks[name] = asyncio.create_task(self._stay(name, self.callers[name]))
            await asyncio.sleep(0)

    async def _stay(self, name: str, callers: list[Hashable]) -> None:
        async with self.turns.place(callers) as place:
            assert place not in self.places
            self.places.add(place)
            self.had.append(name)
            try:
                await self._leave[name].wait()
            finally:
                self.places.remove(place)

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self._settled()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        await self._settled()

    async def _settled(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def order(self) -> str:
        """Let all tasks have their turn and leave. Returns their names in the order of turns."""
        while any(not task.done() for task in self._tasks.values()):
            for name in list(self.had):
                await self.leave(name)
        return " ".join(self.had)


async def test_callers_take_turns_and_each_has_its_own_in_order() -> None:
    waiting = _Waiting(1)
    await waiting.add("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    assert await waiting.order() == "a1 a2 b1 c1 a3 b2 a4"


async def test_who_comes_later_does_not_wait_for_all_of_another() -> None:
    waiting = _Waiting(1)
    await waiting.add(*(f"a{number}" for number in range(6)))
    await waiting.leave("a0")
    await waiting.leave("a1")
    await waiting.add("b0", "b1")
    assert await waiting.order() == "a0 a1 a2 a3 b0 a4 b1 a5"


async def test_places_are_bounded_and_each_is_somebodys_alone() -> None:
    waiting = _Waiting(2)
    await waiting.add("a1", "a2", "a3")
    assert waiting.had == ["a1", "a2"]
    assert waiting.places == {0, 1}
    await waiting.leave("a1")
    assert waiting.had == ["a1", "a2", "a3"]
    assert waiting.places == {0, 1}
    assert await waiting.order() == "a1 a2 a3"
    assert sorted(waiting.turns._free) == [0, 1]


async def test_who_leaves_while_it_waits_takes_no_place() -> None:
    waiting = _Waiting(1)
    await waiting.add("a1", "a2", "b1", "b2")
    await waiting.cancel("a2", "b1")
    assert await waiting.order() == "a1 b2"
    assert (waiting.turns._free, waiting.turns._waiting) == ([0], {})


async def test_who_leaves_with_a_place_gives_it_back() -> None:
    waiting = _Waiting(1)
    await waiting.add("a1", "b1")
    await waiting.cancel("a1")
    assert waiting.had == ["a1", "b1"]
    assert await waiting.order() == "a1 b1"


async def test_who_leaves_in_the_moment_it_gets_a_place_gives_it_back() -> None:
    waiting = _Waiting(1)
    await waiting.add("a1", "b1", "c1")
    waiting._leave["a1"].set()
    # Then it has left, and the next one has not yet heard of it.
    await asyncio.sleep(0)
    assert not waiting.turns._free
    assert waiting.had == ["a1"]
    await waiting.cancel("b1")
    assert await waiting.order() == "a1 c1"
    assert waiting.turns._free == [0]


async def test_what_several_wait_for_begins_in_the_first_turn_of_any() -> None:
    waiting = _Waiting(1)
    await waiting.add("a1", "a2", "a3", "a4", "a5", "b1")
    # Its caller has others before it, and it is the first of one who joins.
    waiting.callers["a5"].append("c")
    assert await waiting.order() == "a1 a2 a5 b1 a3 a4"


async def test_it_takes_the_turn_of_that_one_only() -> None:
    waiting = _Waiting(1)
    await waiting.add("a1", "a2", "a3", "ab4", "b5", "a6")
    assert await waiting.order() == "a1 a2 ab4 a3 b5 a6"


async def test_when_who_began_leaves_it_stays_in_the_lines_of_the_others() -> None:
    waiting = _Waiting(1)
    await waiting.add("a1", "a2", "a3", "bc4", "c5", "d6")
    waiting.callers["bc4"].remove("b")
    assert await waiting.order() == "a1 a2 bc4 d6 a3 c5"
