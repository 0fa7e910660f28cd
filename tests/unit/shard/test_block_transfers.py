"""The server's transfers of blocks: it reads and writes slots, and passes on what came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import NoReturn

import pytest
from support.engines import runner_info

from penstock_proto.types import PrefixNames
from penstock_shard.ipc.block_messages import (
    Arrival,
    Export,
    Exported,
    Fetch,
    FetchOver,
    InboundSlots,
)
from penstock_shard.kv_transfer.arena import Arena, RecordName
from penstock_shard.server.kv import transfers
from penstock_shard.server.kv.transfers import (
    BlockTransfers,
    Distrusted,
    FetchFailed,
    TooManyExports,
)

_DIGESTS = [bytes([number]) * 16 for number in range(1, 4)]
_ROOT = b"r" * 16
_IDS = tuple(range(48))
_PREFIX = PrefixNames(_ROOT, _DIGESTS, b"".join(i.to_bytes(4, "little") for i in _IDS))


def _name(index: int) -> RecordName:
    parent = _DIGESTS[index - 1] if index else _ROOT
    return RecordName(0, index, _DIGESTS[index], parent, _IDS[index * 16 : (index + 1) * 16])


class _Peers:
    """Sends these records, then does what `ending` says."""

    def __init__(self, records: list[bytes], ending: str = "") -> None:
        self._records = records
        self._ending = ending
        self.is_closed = False
        self.late = 0

    async def fetch(
        self, source: str, namespace: bytes, prefix: PrefixNames, num_known: int
    ) -> AsyncGenerator[memoryview, None]:
        try:
            for record in self._records:
                yield memoryview(record)
            if self._ending == "fails":
                raise FetchFailed("it is gone")
            if self._ending == "hangs":
                await asyncio.Event().wait()
        finally:
            self.is_closed = True

    def note_late(self, source: str) -> None:
        self.late += 1

    def distrust(self, source: str, reason: str) -> NoReturn:
        raise Distrusted(reason)


class _Server:
    """Transfers of an engine that has given slots."""

    def __init__(self, peers: _Peers, num_slots: int = 8) -> None:
        self.memory = memoryview(bytearray(2**16))
        self.arena = Arena(self.memory, runner_info())
        self.told: list[Export | Arrival | int] = []
        self.transfers = BlockTransfers(self.memory, peers)
        self.transfers.on_engine_ready(runner_info(), self.told.append)
        self.transfers.take(InboundSlots([(0, slot) for slot in range(num_slots)]))

    async def fetch(self, deadline_s: float = 5.0) -> list[Arrival]:
        self.transfers.take(Fetch(1, "peer:1", _PREFIX, 0, deadline_s))
        async with asyncio.timeout(10):
            while not any(isinstance(each, Arrival) and each.is_last for each in self.told):
                await asyncio.sleep(0.005)
        return [each for each in self.told if isinstance(each, Arrival)]


def _record(name: RecordName) -> bytes:
    arena = Arena(memoryview(bytearray(2**14)), runner_info())
    arena.write(0, name, lambda into: into.__setitem__(slice(None), bytes(128)))
    return bytes(arena.record(0, 0))


async def test_what_comes_is_put_into_slots_and_told_of() -> None:
    server = _Server(_Peers([_record(_name(index)) for index in range(3)]))
    (arrival,) = await server.fetch()
    assert [server.arena.name_in(*slot) for slot in arrival.slots] == [_name(i) for i in range(3)]
    assert not arrival.is_damaged


async def test_a_fetch_of_more_than_there_are_slots_goes_on_as_the_engine_gives_others() -> None:
    server = _Server(_Peers([_record(_name(index)) for index in range(3)]), num_slots=1)

    def tell(message: Export | Arrival | int) -> None:
        server.told.append(message)
        if isinstance(message, Arrival) and message.slots:
            server.transfers.take(InboundSlots([(0, 7)]))

    server.transfers.on_engine_ready(runner_info(), tell)
    arrivals = await server.fetch()
    assert sum(len(arrival.slots) for arrival in arrivals) == 3


@pytest.mark.parametrize(
    "other",
    [
        RecordName(0, 1, _DIGESTS[1], _DIGESTS[0], tuple(range(16))),
        RecordName(0, 1, b"x" * 16, _DIGESTS[0], _IDS[16:32]),
        RecordName(0, 1, _DIGESTS[1], b"x" * 16, _IDS[16:32]),
        RecordName(0, 3, _DIGESTS[2], _DIGESTS[1], _IDS[32:]),
    ],
    ids=["tokens", "digest", "parent", "index"],
)
async def test_a_block_that_was_not_asked_for_is_not_put_anywhere(other: RecordName) -> None:
    server = _Server(_Peers([_record(_name(0)), _record(other)]))
    (arrival,) = await server.fetch()
    assert arrival.is_damaged
    assert [name for _, name in server.arena.names()] == [_name(0)]


@pytest.mark.parametrize("at", [0, 30, 70, -1])
async def test_a_damaged_block_is_not_put_anywhere(at: int) -> None:
    record = bytearray(_record(_name(0)))
    record[at] ^= 2
    server = _Server(_Peers([bytes(record)]))
    (arrival,) = await server.fetch()
    assert (arrival.slots, arrival.is_damaged) == ([], True)
    assert not list(server.arena.names())


@pytest.mark.parametrize("ending", ["fails", "hangs"])
async def test_what_came_before_a_failure_is_told_of(ending: str) -> None:
    peers = _Peers([_record(_name(0))], ending)
    server = _Server(peers)
    arrivals = await server.fetch(0.1)
    assert sum(len(arrival.slots) for arrival in arrivals) == 1
    assert peers.is_closed
    assert peers.late == (ending == "hangs")


async def test_a_fetch_that_nobody_waits_for_ends_at_once() -> None:
    peers = _Peers([], "hangs")
    server = _Server(peers)
    server.transfers.take(Fetch(1, "peer:1", _PREFIX, 0, 60.0))
    await asyncio.sleep(0.01)
    server.transfers.take(FetchOver(1))
    await asyncio.sleep(0.01)
    assert server.told == [Arrival(1, [], is_last=True)]
    assert peers.is_closed


async def test_without_slots_a_fetch_waits_for_some() -> None:
    server = _Server(_Peers([_record(_name(0))]), num_slots=0)
    server.transfers.take(Fetch(1, "peer:1", _PREFIX, 0, 60.0))
    await asyncio.sleep(0.01)
    assert not server.told
    server.transfers.take(InboundSlots([(0, 5)]))
    arrival, *_ = await server.fetch()
    assert arrival.slots == [(0, 5)]


async def test_more_fetches_than_are_begun_are_over_at_once() -> None:
    server = _Server(_Peers([], "hangs"))
    for number in range(9):
        server.transfers.take(Fetch(number, "peer:1", _PREFIX, 0, 60.0))
    assert server.told == [Arrival(8, [], is_last=True)]
    server.transfers.on_engine_death()


async def test_an_export_ends_with_its_engine_and_keeps_nothing() -> None:
    server = _Server(_Peers([]))
    exporting = asyncio.create_task(_all_of(server))
    await asyncio.sleep(0.01)
    assert server.told == [Export(1, _PREFIX, 0)]
    server.transfers.on_engine_death()
    assert await exporting == []


async def test_what_an_export_keeps_is_given_back_when_it_is_read() -> None:
    server = _Server(_Peers([]))
    server.arena.write(20, _name(0), lambda into: into.__setitem__(slice(None), bytes(128)))
    exporting = asyncio.create_task(_all_of(server))
    await asyncio.sleep(0.01)
    server.transfers.take(Exported(1, [(0, 20)]))
    assert await exporting == [bytes(server.arena.record(20, 0))]
    assert server.told == [Export(1, _PREFIX, 0), 1]


async def test_a_third_export_begins_when_another_is_over() -> None:
    server = _Server(_Peers([]))
    exports = [asyncio.create_task(_all_of(server)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert server.told == [Export(1, _PREFIX, 0), Export(2, _PREFIX, 0)]
    server.transfers.take(Exported(1, []))
    await asyncio.sleep(0.01)
    assert server.told[2:] == [1, Export(3, _PREFIX, 0)]
    server.transfers.on_engine_death()
    assert await asyncio.gather(*exports) == [[], [], []]


async def test_an_export_that_gets_no_turn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_TURN_S", 0.01)
    server = _Server(_Peers([]))
    first = [asyncio.create_task(_all_of(server)) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(TooManyExports):
        await _all_of(server)
    server.transfers.on_engine_death()
    await asyncio.gather(*first)


async def test_so_many_exports_wait_and_more_are_refused_at_once() -> None:
    server = _Server(_Peers([]))
    taken = [asyncio.create_task(_all_of(server)) for _ in range(34)]
    await asyncio.sleep(0.01)
    with pytest.raises(TooManyExports):
        await _all_of(server)
    for exporting in taken:
        exporting.cancel()
    await asyncio.gather(*taken, return_exceptions=True)
    # Those that waited hold no turn.
    again = asyncio.create_task(_all_of(server))
    await asyncio.sleep(0.01)
    server.transfers.on_engine_death()
    assert await again == []


async def _all_of(server: _Server) -> list[bytes]:
    return [bytes(record) async for record in server.transfers.export(_PREFIX, 0)]
