"""Blocks from one engine to another, carried by hand: what is found, and what a lie comes to."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from support.engines import CACHE_GROUPS, EngineUnderTest, make_engine, make_request, runner_info

from penstock_proto.types import FinishReason
from penstock_shard.engine import pending_fetches
from penstock_shard.ipc.block_messages import (
    Arrival,
    Distrust,
    Export,
    Exported,
    Fetch,
    FetchOver,
    InboundSlots,
)
from penstock_shard.ipc.messages import FromBlocks, Inbox
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_transfer.arena import Arena, RecordName

_T = TypeVar("_T")
_ALL = (CacheGroup(),)
_PROMPT = list(range(100, 270))


class _Disk:
    """Notes what it is to write."""

    num_blocks = 0
    hangs = False

    def __init__(self) -> None:
        self.names: list[RecordName] = []

    def save(self, name: RecordName, record: Callable[[], bytes]) -> None:
        self.names.append(name)

    def take(self, most: int) -> list[object]:
        return []


@dataclass
class _Shard:
    """An engine, its memory, and what it said of blocks."""

    groups: tuple[CacheGroup, ...]
    said: list[FromBlocks] = field(default_factory=list)
    disk: _Disk | None = None
    memory_bytes: int = 2**18

    def __post_init__(self) -> None:
        self._memory = memoryview(bytearray(self.memory_bytes))
        self.start_engine()

    def start_engine(self) -> None:
        """Start an engine: the first, or another one in its place."""
        memory = self._memory
        self.arena = Arena(memory, runner_info(num_blocks=40, cache_groups=self.groups))
        self.under_test: EngineUnderTest = make_engine(
            num_blocks=40,
            cache_groups=self.groups,
            host_memory=memory,
            send=self.said.append,
            disk=self.disk,  # type: ignore[arg-type]
        )
        self.inbound = [slot for slots in self.of(InboundSlots) for slot in slots.slots]

    def of(self, kind: type[_T]) -> list[_T]:
        return [message for message in self.said if isinstance(message, kind)]

    def ask(self, name: str, source: str = "", *, only_fetches: bool = False) -> None:
        request = make_request(name, _PROMPT, seed=3, kv_source=source, only_fetches=only_fetches)
        self.under_test.engine.submit(request)

    def cached(self, name: str) -> int:
        outputs = self.under_test.outputs
        return next(o.cached_tokens for o in outputs if o.request_id == name) or 0

    @property
    def refused(self) -> float:
        return self.under_test.engine.load().counts["kv_refused_blocks_total"]


Change = Callable[[int, bytearray], None]


def _carry(
    source: _Shard,
    target: _Shard,
    change: Change = lambda index, record: None,
    *,
    num_known: int | None = None,
) -> None:
    """Carry the blocks of the target's last fetch from the source, as servers do. `change` may
    alter each record. With `num_known`, all blocks after the first `num_known` come, in place of
    those that were asked for.
    """
    fetch = target.of(Fetch)[-1]
    export = Export(fetch.number, fetch.prefix, fetch.num_known if num_known is None else num_known)
    source.under_test.engine.take_blocks(Inbox([], [], exports=[export]))
    source.under_test.run()
    exported = source.of(Exported)[-1]
    slots = []
    for pool, slot in exported.slots:
        record = bytearray(source.arena.record_in(pool, slot))
        name = source.arena.name_of(memoryview(record))
        assert name is not None
        change(name.index, record)
        free = next(each for each in target.inbound if each[0] == pool)
        target.inbound.remove(free)
        target.arena.put(free[1], name.group, bytes(record), is_proven=False)
        slots.append(free)
    source.under_test.engine.take_blocks(Inbox([], [], exports_over=[fetch.number]))
    target.under_test.engine.take_blocks(
        Inbox([], [], arrivals=[Arrival(fetch.number, slots, is_last=True)])
    )


def _with_true_checksums(record: bytearray) -> None:
    """Change a byte of the block, and make the checksums fit the change."""
    record[-1] ^= 255
    header = len(record) - 128
    struct.pack_into("<I", record, 8, zlib.crc32(record[header:]))
    struct.pack_into("<I", record, 4, zlib.crc32(record[8:header]))


@pytest.mark.parametrize("groups", CACHE_GROUPS)
def test_a_prefix_is_fetched_whatever_layers_keep(groups: tuple[CacheGroup, ...]) -> None:
    source, target = _Shard(groups), _Shard(groups)
    source.ask("there")
    source.under_test.run()
    target.ask("here", "source:1")
    assert not target.under_test.engine.has_work
    _carry(source, target)
    target.under_test.run()
    assert target.under_test.tokens("here") == source.under_test.tokens("there")
    assert target.cached("here") >= 96
    assert target.refused == 0
    assert target.under_test.engine.load().counts["kv_fetched_blocks_total"] > 0
    for shard in (source, target):
        shard.under_test.engine.check_integrity()


def test_who_lacks_the_same_blocks_waits_for_the_same_fetch() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.ask("here", "source:1")
    for name, asked in (("knows no source", ""), ("knows it too", "source:1"), ("leaves", "")):
        target.ask(name, asked)
    target.under_test.engine.abort("leaves", 0)
    assert len(target.of(Fetch)) == 1
    assert not target.of(FetchOver)
    assert not target.under_test.engine.has_work
    _carry(source, target)
    target.under_test.run()
    for name in ("here", "knows no source", "knows it too"):
        assert target.cached(name) >= 144
        assert target.under_test.tokens(name) == source.under_test.tokens("there")
    target.under_test.engine.check_integrity()


def test_a_fetch_for_which_nobody_waits_any_more_is_over() -> None:
    target = _Shard(_ALL)
    target.ask("first", "source:1")
    target.ask("second")
    target.under_test.engine.abort("first", 0)
    assert not target.of(FetchOver)
    target.under_test.engine.abort("second", 0)
    assert target.of(FetchOver)
    target.ask("third")
    target.under_test.run()
    assert target.cached("third") == 0


def test_a_request_that_only_fetches_ends_with_its_blocks_and_computes_nothing() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.ask("ahead", "source:1", only_fetches=True)
    assert target.of(Fetch)[-1].deadline_s == 30.0
    _carry(source, target)
    target.under_test.run()
    (ending,) = target.under_test.endings("ahead")
    # The last block is to be computed.
    assert (ending.finish_reason, ending.cached_tokens) == (FinishReason.FETCHED, 144)
    assert target.under_test.engine.steps_total == 0
    target.ask("after", "source:1")
    target.under_test.run()
    assert len(target.of(Fetch)) == 1
    assert target.cached("after") == 144
    assert target.under_test.tokens("after") == source.under_test.tokens("there")
    target.under_test.engine.check_integrity()


def test_what_was_fetched_ahead_is_in_blocks_before_its_request_comes() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.ask("ahead", "source:1", only_fetches=True)
    _carry(source, target)
    target.under_test.run()
    assert target.under_test.engine.load().counts["kv_loaded_blocks_total"] == 9
    assert target.under_test.blocks.num_referenced == 0
    target.ask("after", "source:1")
    target.under_test.step()
    assert target.under_test.scheduler.num_running == 1
    target.under_test.run()
    assert target.under_test.engine.load().counts["kv_loaded_blocks_total"] == 9


def test_what_was_fetched_ahead_takes_no_more_than_half_of_the_free_blocks() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    others = make_request("others", list(range(300, 716)), max_tokens=40)
    target.under_test.engine.submit(others)
    for _ in range(8):
        target.under_test.step()
    target.ask("ahead", "source:1", only_fetches=True)
    _carry(source, target)
    target.under_test.step()
    target.under_test.step()
    (ending,) = target.under_test.endings("ahead")
    assert ending.cached_tokens == 144
    assert target.under_test.engine.load().counts["kv_loaded_blocks_total"] == 0
    target.under_test.run()
    target.under_test.engine.check_integrity()


def test_a_fetch_ahead_that_is_aborted_while_it_is_loaded_keeps_nothing() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.under_test.engine.submit(make_request("others", [5] * 20, max_tokens=40))
    target.under_test.step()
    target.under_test.step()
    target.ask("ahead", "source:1", only_fetches=True)
    _carry(source, target)
    target.under_test.step()
    assert not target.under_test.endings("ahead")
    target.under_test.engine.abort("ahead", 0)
    target.under_test.run()
    (ending,) = target.under_test.endings("ahead")
    assert ending.finish_reason is FinishReason.ABORTED
    assert target.under_test.blocks.num_referenced == 0
    target.under_test.engine.check_integrity()


@pytest.mark.parametrize(("compute_s", "is_fetched"), [(0.02, False), (0.03, True), (0.0, True)])
def test_what_is_computed_as_soon_as_it_is_fetched_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch, compute_s: float, is_fetched: bool
) -> None:
    target = _Shard(_ALL)
    moves = target.under_test.moves
    assert moves is not None
    # 0 is not known.
    monkeypatch.setattr(moves.fetches, "_compute_s", lambda start, count: compute_s)
    target.ask("here", "source:1")
    assert bool(target.of(Fetch)) == is_fetched
    # Of that nobody waits.
    target.ask("ahead", "source:1", only_fetches=True)
    assert target.of(Fetch)


def test_a_request_that_only_fetches_and_has_nothing_to_fetch_ends_at_once() -> None:
    target = _Shard(_ALL)
    target.ask("nowhere", only_fetches=True)
    target.under_test.run()
    (ending,) = target.under_test.endings("nowhere")
    assert (ending.finish_reason, ending.cached_tokens) == (FinishReason.FETCHED, 0)
    assert not target.of(Fetch)


def test_an_aborted_fetch_ahead_is_over_and_keeps_nothing() -> None:
    target = _Shard(_ALL)
    target.ask("ahead", "source:1", only_fetches=True)
    target.under_test.engine.abort("ahead", 0)
    target.under_test.run()
    (ending,) = target.under_test.endings("ahead")
    assert ending.finish_reason is FinishReason.ABORTED
    assert target.of(FetchOver)
    target.under_test.engine.check_integrity()


def test_the_last_block_is_computed_and_compared() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.ask("here", "source:1")
    _carry(source, target)
    target.under_test.run()
    assert target.cached("here") == len(_PROMPT) // 16 * 16 - 16
    assert not target.of(Distrust)
    target.ask("again")
    target.under_test.run()
    assert target.cached("again") == len(_PROMPT) // 16 * 16


def test_a_peer_whose_block_differs_is_given_up_with_all_of_its_blocks() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.ask("here", "source:1")
    last = len(_PROMPT) // 16 - 1

    def lie(index: int, record: bytearray) -> None:
        if index == last:
            _with_true_checksums(record)

    _carry(source, target, lie)
    target.under_test.run()
    assert [message.source for message in target.of(Distrust)] == ["source:1"]
    assert target.refused == 1
    assert target.under_test.tokens("here") == source.under_test.tokens("there")
    # It was computed again, and others find what was computed.
    assert target.under_test.engine.load().counts["preemptions_total"] == 1
    target.under_test.engine.check_integrity()


def test_a_request_that_is_aborted_while_it_waits_for_a_peer_leaves_nothing() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.ask("here", "source:1")
    target.under_test.engine.abort("here", 0)
    assert target.of(FetchOver)
    num_slots = len(target.inbound)
    _carry(source, target)
    target.under_test.run()
    assert target.under_test.engine.load().counts["kv_fetched_blocks_total"] == 0
    # What came goes back to the server.
    back = target.of(InboundSlots)[-1].slots
    assert len(back) + len(target.inbound) == num_slots
    assert target.under_test.blocks.num_referenced == 0
    target.under_test.engine.check_integrity()


def test_a_fetch_of_which_nothing_comes_is_computed() -> None:
    target = _Shard(_ALL)
    target.ask("here", "source:1")
    (fetch,) = target.of(Fetch)
    assert (fetch.source, fetch.num_known) == ("source:1", 0)
    last = Arrival(fetch.number, [], is_last=True)
    target.under_test.engine.take_blocks(Inbox([], [], arrivals=[last]))
    target.under_test.run()
    assert target.cached("here") == 0
    alone = make_engine()
    alone.engine.submit(make_request("alone", _PROMPT, seed=3))
    alone.run()
    assert target.under_test.tokens("here") == alone.tokens("alone")


def test_a_shard_that_has_all_of_it_asks_nobody() -> None:
    target = _Shard(_ALL)
    target.ask("here")
    target.under_test.run()
    target.ask("again", "source:1")
    assert not target.of(Fetch)


def test_a_prefix_that_nobody_has_computed_is_exported_as_nothing() -> None:
    source = _Shard(_ALL)
    target = _Shard(_ALL)
    target.ask("here", "source:1")
    fetch = target.of(Fetch)[-1]
    export = Export(7, fetch.prefix, 0)
    source.under_test.engine.take_blocks(Inbox([], [], exports=[export]))
    source.under_test.run()
    assert source.of(Exported) == [Exported(7, [])]


def test_blocks_of_other_tokens_than_were_asked_for_are_refused() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    other = [token_id + 1 for token_id in _PROMPT]
    for name in ("there", "again"):
        source.under_test.engine.submit(make_request(name, other))
        source.under_test.run()
    target.ask("here", "source:1")
    (fetch,) = target.of(Fetch)
    slots = target.inbound[:3]
    for (_, slot), (at, _) in zip(slots, source.arena.names(), strict=False):
        target.arena.put(slot, 0, source.arena.record(at, 0))
    arrival = Arrival(fetch.number, slots, is_last=True)
    target.under_test.engine.take_blocks(Inbox([], [], arrivals=[arrival]))
    target.under_test.run()
    assert (target.cached("here"), target.refused) == (0, 3)
    assert not list(target.arena.names())


def _blocks_at(shard: _Shard, asker: _Shard, number: int) -> int:
    """Count the blocks that `shard` exports of the prefix that `asker` last wanted to fetch."""
    fetch = asker.of(Fetch)[-1]
    export = Export(number, fetch.prefix, 0)
    shard.under_test.engine.take_blocks(Inbox([], [], exports=[export]))
    shard.under_test.run()
    shard.under_test.engine.take_blocks(Inbox([], [], exports_over=[number]))
    return len(shard.of(Exported)[-1].slots)


def test_what_is_there_already_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer sends blocks that it was not asked for: those that are on the device here."""
    monkeypatch.setattr(pending_fetches, "_LEAST_S", 0.0)
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.under_test.engine.submit(make_request("begins alike", _PROMPT[:100], seed=3))
    target.under_test.run()
    target.ask("here", "source:1")
    fetch = target.of(Fetch)[-1]
    assert fetch.num_known == 6
    _carry(source, target, num_known=0)
    assert target.under_test.engine.load().counts["kv_fetched_blocks_total"] == 4
    assert target.refused == 6
    target.under_test.run()
    assert target.under_test.tokens("here") == source.under_test.tokens("there")


def test_of_a_prefix_that_has_no_room_the_beginning_is_fetched() -> None:
    target = _Shard(_ALL, memory_bytes=4096 + 8 * 320)
    num_slots = target.arena.num_slots[0]
    target.ask("here", "source:1")
    prefix = target.of(Fetch)[-1].prefix
    assert len(prefix.digests) == num_slots * 7 // 8 < len(_PROMPT) // 16
    assert len(prefix.token_ids) == 4 * 16 * len(prefix.digests)


def test_a_shard_that_ends_fetches_nothing_more() -> None:
    target = _Shard(_ALL)
    target.ask("ahead", "source:1", only_fetches=True)
    target.under_test.engine.take_blocks(Inbox([], [], drains=True))
    target.under_test.run()
    (ending,) = target.under_test.endings("ahead")
    assert ending.finish_reason is FinishReason.ABORTED


def test_what_came_from_a_peer_goes_to_another_once_it_is_proven() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.ask("here", "source:1", only_fetches=True)
    _carry(source, target)
    target.under_test.run()
    assert _blocks_at(target, target, 101) == 0
    target.ask("computes its last block")
    target.under_test.run()
    assert _blocks_at(target, target, 102) == len(_PROMPT) // 16


@pytest.mark.parametrize("is_proven", [False, True])
def test_the_next_engine_finds_what_came_from_a_peer_if_it_was_proven(is_proven: bool) -> None:
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.ask("here", "source:1", only_fetches=True)
    _carry(source, target)
    target.under_test.run()
    if is_proven:
        target.ask("computes its last block")
        target.under_test.run()
    target.start_engine()
    target.ask("after")
    target.under_test.run()
    assert target.cached("after") == (len(_PROMPT) // 16 * 16 if is_proven else 0)
    assert target.under_test.tokens("after") == source.under_test.tokens("there")


def test_what_a_peer_sent_is_not_written_to_disk() -> None:
    source, target = _Shard(_ALL), _Shard(_ALL, disk=_Disk())
    source.ask("there")
    source.under_test.run()
    target.ask("here", "source:1")
    _carry(source, target)
    target.under_test.run()
    assert target.disk is not None
    last = len(_PROMPT) // 16 - 1
    # The one that was computed here.
    assert {name.index for name in target.disk.names} == {last}


def test_an_engine_that_has_computed_nothing_yet_waits_long_enough_for_long_prefixes() -> None:
    # A shard that joins would compute what the fleet has, as nothing is known of its device.
    source, target = _Shard(_ALL), _Shard(_ALL)
    source.ask("there")
    source.under_test.run()
    target.ask("here", "source:1")
    assert target.of(Fetch)[-1].deadline_s == 2.0
    _carry(source, target)
    target.under_test.run()
    assert target.cached("here") > 0
