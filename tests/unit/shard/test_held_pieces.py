"""Pieces that a shard says it holds: all that it has, where, and none before it is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.budget import budget, seeded
from support.engines import CACHE_GROUPS, EngineUnderTest, make_engine, make_request, runner_info
from support.processes import wait_until
from support.shadow import ShadowStep

from penstock_proto.prefix_hash import Tier, piece_blocks, piece_name, piece_names, root_hash
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_cache.block_pool import BlockPool
from penstock_shard.kv_cache.held_pieces import HeldPieces
from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix
from penstock_shard.kv_transfer.arena import Arena, namespace_of
from penstock_shard.kv_transfer.disk_tier import DiskTier
from penstock_shard.kv_transfer.segments import Segments

_GONE = int(Tier.GONE)


class _Told:
    """A listener that is told an engine's pieces; `tiers` maps their names to their tiers."""

    def __init__(self, engine: EngineUnderTest) -> None:
        self._engine = engine.engine
        self.tiers: dict[int, int] = {}

    def take(self) -> None:
        for name, tier in self._engine.take_changed_pieces().items():
            self.tiers[name] = tier
            if tier == _GONE:
                del self.tiers[name]

    def take_all(self) -> None:
        self.take()
        while self._engine.has_changed_pieces:
            self.take()


def _walked(engine: EngineUnderTest, groups: tuple[CacheGroup, ...]) -> dict[int, int]:
    """Look up the pieces of the tree and the disk one by one. Returns their tiers by name."""
    whole = [i for i, group in enumerate(groups) if group.reach is None and not group.has_state]
    tree, each = engine.blocks.prefixes._tree._by_digest, piece_blocks(engine.blocks.block_size)
    disk = engine.blocks.prefixes.held.disk
    digests = {digest: prefix for digest, prefix in tree.items() if (prefix.index + 1) % each == 0}
    places = {} if not isinstance(disk, DiskTier) else disk._segments._places
    ends = {key[1] for key, (*_, index) in places.items() if (index + 1) % each == 0}
    found = {}
    for digest in digests.keys() | ends:
        prefix, tiers = digests.get(digest), []
        for group in whole or [0]:
            if prefix is not None and prefix.parent and prefix.block_ids[group] != NO_BLOCK:
                tiers.append(1)
            elif prefix is not None and prefix.parent and prefix.slots[group] != NO_BLOCK:
                tiers.append(2)
            else:
                tiers.append(3 if (group, digest) in places else 4)
        if max(tiers) != _GONE:
            found[piece_name(digest)] = max(tiers)
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    info = runner_info(num_blocks=40, block_size=16)
    arena = Arena(memoryview(bytearray(2**18)), info)
    segments = Segments(tmp_path, namespace_of(info), arena, max_bytes=2**14, age_s=3600.0)
    made = DiskTier(segments)
    yield made
    made.close()


def _prompt(rng: random.Random) -> list[int]:
    """Return the start of one of nine texts, cut at random, and a random token after it."""
    start = rng.randrange(9) * 90
    return [start + i % 97 for i in range(rng.randint(1, 400))] + [rng.randrange(900)]


def _fails(rng: random.Random, share: float, step: ShadowStep) -> bool:
    return step.batch.num_rows > 1 and rng.random() < share


def _run(rng: random.Random, engine: EngineUnderTest, told: _Told, turns: int) -> None:
    for number in range(turns):
        if rng.random() < 0.2:
            salt = rng.choice(("", "", "mine"))
            request = make_request(
                f"r{id(told)}-{number}", _prompt(rng), max_tokens=9, cache_salt=salt
            )
            engine.engine.submit(request)
        engine.step()
        told.take()


def _settle(engine: EngineUnderTest, told: _Told, disk: DiskTier | None) -> None:
    for _ in range(3):
        engine.run()
    if disk is not None:
        wait_until(lambda: not disk._written, timeout_s=10, what="all is written")
    told.take_all()


def _uncache_some(rng: random.Random, engine: EngineUnderTest) -> None:
    prefixes = engine.blocks.prefixes
    known = [prefix for prefix in prefixes._tree._by_digest.values() if prefix.parent]
    for prefix in rng.sample(known, min(3, len(known))):
        for group in range(prefixes.num_groups):
            if prefixes._tree.named(prefix.digest) is prefix:
                prefixes.uncache(prefix, group)


@pytest.mark.parametrize("groups", CACHE_GROUPS)
def test_what_is_told_is_what_there_is_after_random_traffic(
    groups: tuple[CacheGroup, ...],
) -> None:
    rng = seeded("held pieces")
    for _ in range(budget(1, 40)):
        has_states = any(group.has_state for group in groups)
        failing = rng.choice((0.0, 0.02))
        engine = make_engine(
            num_blocks=rng.choice((40, 80)),
            block_size=16 if has_states else rng.choice((16, 64)),
            max_steps_ahead=rng.choice((0, 1)),
            cache_groups=groups,
            host_memory=memoryview(bytearray(2**18)),
            fails=partial(_fails, rng, failing),
        )
        told = _Told(engine)
        for _ in range(3):
            _run(rng, engine, told, 120)
            _settle(engine, told, None)
            assert told.tiers == _walked(engine, groups)
            _uncache_some(rng, engine)
            told.take_all()
            assert told.tiers == _walked(engine, groups)


def test_what_the_disk_has_is_told_and_what_it_drops(disk: DiskTier) -> None:
    rng = seeded("held pieces on disk")
    memory = memoryview(bytearray(2**14))
    engine = make_engine(num_blocks=40, host_memory=memory, disk=disk)
    told = _Told(engine)
    seen: set[int] = set()
    for _ in range(budget(3, 40)):
        _run(rng, engine, told, 200)
        _settle(engine, told, disk)
        assert told.tiers == _walked(engine, (CacheGroup(),))
        seen |= set(told.tiers.values())
    assert seen == {Tier.DEVICE, Tier.HOST, Tier.DISK}


def test_what_an_engine_before_has_left_is_told_without_traffic(
    tmp_path: Path,
) -> None:
    memory, info = memoryview(bytearray(2**18)), runner_info(num_blocks=40)

    def start() -> tuple[EngineUnderTest, DiskTier]:
        arena = Arena(memory, info)
        segments = Segments(tmp_path, namespace_of(info), arena, max_bytes=2**20, age_s=3600.0)
        disk = DiskTier(segments)
        wait_until(lambda: not disk._busy_since_s, timeout_s=5, what="scanned")
        return make_engine(num_blocks=40, host_memory=memory, disk=disk), disk

    engine, disk = start()
    for number in range(2):
        engine.engine.submit(make_request(str(number), range(200, 500)))
        engine.run()
    wait_until(lambda: not disk._written, timeout_s=5, what="all is written")
    disk.close()
    names = piece_names(root_hash("fake"), range(200, 500), 16)
    assert len(names) == 2
    for tier in (Tier.HOST, Tier.DISK):
        engine, disk = start()
        told = _Told(engine)
        assert engine.engine.has_changed_pieces
        told.take_all()
        assert [told.tiers.get(name) for name in names] == [tier, tier]
        disk.close()
        memory = memoryview(bytearray(2**18))


def _cache() -> tuple[PrefixCache, BlockPool, list[Prefix]]:
    """Return a cache, its pool, and prefixes of one to four blocks. Two blocks are a piece."""
    pool = BlockPool(8)
    cache = PrefixCache([CacheGroup()], [pool], 64, [BlockPool(8)])
    prefixes = [cache.root(b"root" * 4)]
    for number in range(4):
        digest = bytes([number]) * 16
        prefixes.append(cache.child(prefixes[-1], digest, (number,) * 64))
    return cache, pool, prefixes[1:]


def test_a_piece_is_told_once_the_step_that_fills_it_is_over() -> None:
    cache, pool, prefixes = _cache()
    for prefix in prefixes[:2]:
        cache.name(prefix, 0, pool.take()[0])
    name = piece_name(prefixes[1].digest)
    assert cache.held.take(1) == {}
    # Nothing is to be done about it before the next step.
    assert not cache.held.has_changes
    assert cache.held.take(2) == {name: Tier.DEVICE}
    assert cache.held.take(2) == {}


def test_what_was_never_computed_is_never_told_to_be_there() -> None:
    cache, pool, prefixes = _cache()
    for prefix in prefixes[:2]:
        cache.name(prefix, 0, pool.take()[0])
    assert cache.held.take(0) == {}
    cache.uncache_since(0)
    assert cache.held.take(0) == {piece_name(prefixes[1].digest): Tier.GONE}


def test_what_a_peer_sent_is_not_told_while_it_is_being_checked() -> None:
    cache, pool, prefixes = _cache()
    last = prefixes[1]
    cache.keep(last, 0, 3)
    assert cache.held.take(0) == {piece_name(last.digest): Tier.HOST}
    # As `ImportChecks.watch` does: it is computed here before anybody finds it.
    cache.drop(last, 0)
    last.num_users += 1
    cache.watch(last, 0)
    assert cache.held.take(0) == {piece_name(last.digest): Tier.GONE}
    cache.name(last, 0, pool.take()[0])
    assert cache.held.take(0) == {}


def test_a_copy_in_host_memory_is_told_when_the_device_needs_the_block() -> None:
    cache, pool, prefixes = _cache()
    last = prefixes[3]
    block_id, _ = pool.take()
    cache.name(last, 0, block_id)
    cache.keep(last, 0, 0)
    assert cache.held.take(1) == {piece_name(last.digest): Tier.DEVICE}
    cache.forget(pool.cached.pop(block_id))
    assert cache.held.take(1) == {piece_name(last.digest): Tier.HOST}


def test_a_turn_takes_a_bounded_number() -> None:
    cache, _, prefixes = _cache()
    held: HeldPieces = cache.held
    for number in range(3000):
        held._changed[number.to_bytes(16, "little")] = None
    assert len(held.take(0)) == 1024
    assert held.has_changes
    assert len({**held.take(0), **held.take(0)}) == 1976 > len(prefixes)
    assert not held.has_changes
