"""Readers that follow a shard's pieces: each has what the shard has, however slowly it reads."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from support.budget import budget, seeded

from penstock_proto import codec
from penstock_proto import shard_pb2 as pb
from penstock_proto.prefix_hash import Tier
from penstock_shard.server.kv import held_pieces
from penstock_shard.server.kv.held_pieces import HeldPieces, PiecesReport

_GONE = int(Tier.GONE)


@pytest.fixture(autouse=True)
def no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_pieces, "_MIN_REPORT_INTERVAL_S", 0.0)


class _Reader:
    """Follows pieces as a router does, while `reads` is set."""

    def __init__(self, held: HeldPieces) -> None:
        self.tiers: dict[int, int] = {}
        self.instance_id = ""
        self.num_snapshots = self.num_reports = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self._held = held
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async with aclosing(self._held.watch()) as reports:
            async for report in reports:
                self._take(report)
                await self.reads.wait()

    def _take(self, report: PiecesReport) -> None:
        assert len(report.pieces) <= held_pieces._MOST_IN_REPORT
        self.num_reports += 1
        self.num_snapshots += report.ends
        if report.begins:
            self.tiers, self.instance_id = {}, report.instance_id
        assert report.instance_id == self.instance_id
        self.tiers.update(report.pieces)
        for name in [name for name, tier in report.pieces if tier == _GONE]:
            del self.tiers[name]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class _World:
    def __init__(self) -> None:
        self.held = HeldPieces()
        self.expected: dict[int, int] = {}
        self.readers: list[_Reader] = []

    def reader(self) -> _Reader:
        self.readers.append(_Reader(self.held))
        return self.readers[-1]

    def begin(self, instance_id: str) -> None:
        self.held.begin(instance_id)
        self.expected.clear()

    def change(self, changes: dict[int, int]) -> None:
        self.held.take(changes)
        self.expected.update(changes)
        self.expected = {name: tier for name, tier in self.expected.items() if tier != _GONE}

    async def settle(self) -> None:
        for reader in self.readers:
            reader.reads.set()
        for _ in range(5):
            await asyncio.sleep(0.001)
            # All that is to be done at once is done by then.
            for _ in range(300):
                await asyncio.sleep(0)

    def check(self) -> None:
        assert len(self.held) == len(self.expected)
        for reader in self.readers:
            assert reader.tiers == self.expected


@pytest.fixture
async def world() -> AsyncIterator[_World]:
    made = _World()
    yield made
    for reader in made.readers:
        await reader.close()
    assert not made.held._watches


def _changes(rng: random.Random, count: int, of: int = 5000) -> dict[int, int]:
    return {rng.randrange(of) * 0x9E3779B97F4A7C15 % 2**64: rng.randint(1, 4) for _ in range(count)}


async def test_a_snapshot_and_what_changes_add_up_to_what_is_held(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = seeded("watched pieces")
    monkeypatch.setattr(held_pieces, "_MOST_IN_REPORT", 100)
    monkeypatch.setattr(held_pieces, "_MOST_CHANGED", 1500)
    world.begin("first")
    for turn in range(budget(40, 400)):
        if rng.random() < 0.1:
            world.reader()
        if rng.random() < 0.05:
            world.begin(f"engine {turn}")
        for _ in range(rng.randint(0, 4)):
            world.change(_changes(rng, rng.choice((1, 30, 800))))
            if world.readers and rng.random() < 0.3:
                # It reads nothing for a while.
                rng.choice(world.readers).reads.clear()
            for _ in range(rng.randint(0, 5)):
                await asyncio.sleep(0)
        if rng.random() < 0.5:
            await world.settle()
            world.check()
    await world.settle()
    world.check()


async def test_who_reads_nothing_for_long_is_told_everything_again(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_pieces, "_MOST_CHANGED", 100)
    world.begin("engine")
    quick, slow = world.reader(), world.reader()
    await world.settle()
    world.change({1: 1})
    await asyncio.sleep(0.01)
    slow.reads.clear()
    world.change({2: 1})
    await asyncio.sleep(0.01)
    for name in range(3, 400):
        world.change({name: 1})
        await asyncio.sleep(0)
        assert all(len(watch.changed) <= 100 for watch in world.held._watches)
    await world.settle()
    world.check()
    assert (quick.num_snapshots, slow.num_snapshots) == (1, 2)


async def test_an_engine_that_starts_anew_holds_nothing_of_the_one_before(world: _World) -> None:
    world.begin("first")
    reader = world.reader()
    world.change({1: 1, 2: 2})
    await world.settle()
    world.begin("second")
    await world.settle()
    assert (reader.instance_id, reader.tiers) == ("second", {})
    world.check()


async def test_what_is_no_news_is_not_told(world: _World) -> None:
    world.begin("engine")
    reader = world.reader()
    world.change({1: 1})
    await world.settle()
    before = reader.num_reports
    world.change({1: 1, 2: _GONE})
    await world.settle()
    assert reader.num_reports == before


async def test_changes_are_told_ten_times_a_second_at_most(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_pieces, "_MIN_REPORT_INTERVAL_S", 0.1)
    world.begin("engine")
    reader = world.reader()
    ends_s = time.monotonic() + 0.35
    name = 0
    while time.monotonic() < ends_s:
        name += 1
        world.change({name: 1})
        await asyncio.sleep(0.002)
    assert 2 <= reader.num_reports <= 5


async def test_no_more_pieces_are_known_than_the_bound(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_pieces, "_MOST_PIECES", 10)
    world.held.begin("engine")
    world.held.take(dict.fromkeys(range(20), 1))
    assert len(world.held) == 10
    world.held.take({0: _GONE, 19: 1})
    assert len(world.held) == 10


def test_every_field_of_a_report_reaches_the_client() -> None:
    pieces = [(1, 1), (2**64 - 1, 1), (2, 2), (3, 3), (4, 4)]
    message = codec.blocks_message("i", pieces, begins=True, ends=True)
    told = codec.blocks_report(pb.BlocksReport.FromString(message.SerializeToString()))
    assert {tier: list(names) for tier, names in told.pieces.items()} == {
        Tier.DEVICE: [1, 2**64 - 1],
        Tier.HOST: [2],
        Tier.DISK: [3],
        Tier.GONE: [4],
    }
    assert (told.instance_id, told.snapshot_begins, told.snapshot_ends) == ("i", True, True)
    # Named by its lists alone, no report is larger than it may be.
    pieces = [(2**64 - 1, 1)] * held_pieces._MOST_IN_REPORT
    assert codec.blocks_message("i" * 32, pieces, begins=True, ends=True).ByteSize() < 2**20
