"""Cached prefixes: their blocks on the device, and copies of the blocks.

If host memory has slots for copies, a block is copied when its prefix is used again, or when the
sequence that computed it is preempted. A prefix is found by its blocks or by their copies, so it
stays cached when the device reuses the blocks.
"""

from __future__ import annotations

import itertools
from collections import Counter, abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_cache.block_pool import BlockPool, CachedBlock
from penstock_shard.kv_cache.doubt import Doubt, is_wrong, may_follow
from penstock_shard.kv_cache.held_pieces import HeldPieces
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix, PrefixTree

# At most this many blocks wait to be copied. Others are computed again when needed.
_MOST_WISHES = 65_536
# At most this many waiting blocks are looked at in a turn.
_LOOKED_AT = 256


@dataclass(slots=True)
class Save:
    """A block to be copied. `insertion` is as in `CachedBlock`."""

    prefix: Prefix
    group: int
    block_id: int
    insertion: int


class HasBlocks(Protocol):
    """A prefix that may have a block, or its copy, in each group."""

    def has(self, group: int) -> bool:
        """Tell whether the group's block or its copy exists."""


class PrefixCache:
    """Owns the names of cached blocks and of copies in slots. The pools know which blocks and slots
    are free.
    """

    def __init__(
        self,
        groups: abc.Sequence[CacheGroup],
        pools: abc.Sequence[BlockPool],
        block_size: int,
        host_pools: abc.Sequence[BlockPool] = (),
    ) -> None:
        """Cache blocks of `pools`. `host_pools` are the slots for copies of each pool's blocks."""
        self._groups = groups
        self._host_pools = host_pools
        self._pools = pools
        self._block_size = block_size
        self._states = [i for i, group in enumerate(groups) if group.has_state]
        self._sliding = [i for i, group in enumerate(groups) if group.reach is not None]
        some = {*self._sliding, *self._states}
        # Groups in which a prefix needs every block.
        self._whole = [i for i in range(len(groups)) if i not in some]
        self._tree = PrefixTree(len(groups))
        self.held = HeldPieces(self._tree, groups, pools, block_size)
        self.num_insertions = 0
        # `_wishes`: blocks to copy, by prefix and group. `_evictions`: those that were evicted;
        # they keep their contents until the next step is launched.
        self._wishes: dict[tuple[int, int], Save] = {}
        self._evictions: list[Save] = []
        self._watches: set[tuple[int, int]] = set()
        # Users that pin a slot, by pool and slot.
        self._pins: Counter[tuple[int, int]] = Counter()

    def find(self, root: bytes, names: Iterable[tuple[bytes, tuple[int, ...]]]) -> list[Prefix]:
        """Return the known prefixes after a root, shortest first, up to the first block that a
        group with full attention lacks. A name is a block's chained hash and tokens.
        """
        found: list[Prefix] = []
        parent = self._tree.find(None, root)
        if parent is None:
            return found
        for digest, token_ids in names:
            prefix = self._tree.find(parent, digest, token_ids)
            if prefix is None or any(not prefix.has(group) for group in self._whole):
                break
            if prefix.doubt is not parent.doubt and not may_follow(parent.doubt, prefix.doubt):
                break
            found.append(prefix)
            parent = prefix
        return found

    def longest(self, found: abc.Sequence[HasBlocks]) -> int:
        """Return the length of the longest found prefix that has all blocks which the next token
        sees.
        """
        # For each group, `run[count]` is the number of blocks without a gap at the end of the first
        # `count` prefixes.
        runs = [(group, _runs(group, found)) for group in self._sliding]
        count = len(found)
        while count and (
            any(not found[count - 1].has(group) for group in self._states)
            or any(count - run[count] > self.first_visible(group, count) for group, run in runs)
        ):
            count -= 1
        return count

    def first_visible(self, group: int, count: int) -> int:
        """Return the first block that the token after `count` blocks sees."""
        return self._groups[group].first_visible(count * self._block_size) // self._block_size

    @property
    def slides(self) -> bool:
        """True if a prefix can be found without all of its blocks."""
        return bool(self._sliding or self._states)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def pool_of(self, group: int) -> int:
        return self._groups[group].pool

    def first_needed(self, group: int, count: int) -> int:
        """Return the first block that a prefix of `count` blocks needs in a group."""
        return count - 1 if self._groups[group].has_state else self.first_visible(group, count)

    def is_useful(self, prefix: HasBlocks) -> bool:
        """Tell whether a prefix has its block in each group that needs every block."""
        return all(prefix.has(group) for group in self._whole)

    def root(self, digest: bytes, *, is_salted: bool = False) -> Prefix:
        """Return a root: the prefix without tokens, at which a chain begins."""
        found = self._tree.find(None, digest)
        return found or self._tree.add(None, digest, is_salted=is_salted)

    def child(self, parent: Prefix, digest: bytes, token_ids: tuple[int, ...]) -> Prefix:
        known = self._tree.find(parent, digest, token_ids)
        if known is not None:
            return known
        return self._tree.add(parent, digest, token_ids, is_salted=parent.is_salted)

    def name(self, prefix: Prefix, group: int, block_id: int, doubt: Doubt | None = None) -> None:
        """Cache a block under a prefix. `doubt` is about the blocks that it was computed from."""
        if max(prefix.slots, default=NO_BLOCK) == NO_BLOCK or is_wrong(prefix.doubt):
            prefix.doubt = doubt
        prefix.block_ids[group] = block_id
        self.num_insertions += 1
        pool = self._pools[self._groups[group].pool]
        pool.cached[block_id] = CachedBlock(prefix, group, self.num_insertions)
        self.held.note(prefix)
        if self._watches and (id(prefix), group) in self._watches:
            self._wish(prefix, group)

    def uncache(self, prefix: Prefix, group: int) -> None:
        """Uncache a prefix's wrong block and its copy."""
        block_id = prefix.block_ids[group]
        if block_id != NO_BLOCK:
            self._pools[self._groups[group].pool].uncache(block_id)
            self._withdraw(prefix, group)
            self.forget(CachedBlock(prefix, group, 0))
        if prefix.slots[group] != NO_BLOCK:
            self.drop(prefix, group)

    def uncache_those(self, is_meant: Callable[[Prefix], bool]) -> None:
        for prefix, group in self.cached_blocks():
            if is_meant(prefix):
                self.uncache(prefix, group)

    def forget(self, cached: CachedBlock) -> None:
        """Note that a block is no longer cached."""
        cached.prefix.block_ids[cached.group] = NO_BLOCK
        self.held.note(cached.prefix)
        if self._wishes:
            save = self._wishes.pop((id(cached.prefix), cached.group), None)
            if save is not None:
                self._evictions.append(save)
        self._tree.prune(cached.prefix)

    def uncache_since(self, since: int) -> None:
        """Uncache blocks with a later insertion than `since`, because they were not computed."""
        for pool in self._pools:
            for block_id, cached in list(pool.cached.items()):
                if cached.insertion > since:
                    pool.uncache(block_id)
                    self._withdraw(cached.prefix, cached.group)
                    self.forget(cached)

    def _withdraw(self, prefix: Prefix, group: int) -> None:
        """Do not copy a block that waits to be copied, because its contents are wrong."""
        save = self._wishes.pop((id(prefix), group), None)
        if save is not None:
            self.leave(save.prefix)

    def leave(self, prefix: Prefix) -> None:
        self._tree.leave(prefix)

    @property
    def has_copies(self) -> bool:
        """True if host memory has room for copies."""
        return bool(self._host_pools)

    @property
    def most_copies(self) -> int:
        """The number of blocks of each group for which host memory has room."""
        sharers = Counter(group.pool for group in self._groups)
        return min(self._host_pools[pool].num_blocks // count for pool, count in sharers.items())

    @property
    def num_copies(self) -> int:
        return sum(len(pool.cached) for pool in self._host_pools)

    @property
    def has_wishes(self) -> bool:
        """True if blocks wait to be copied."""
        return bool(self._wishes or self._evictions)

    def use(self, prefixes: abc.Sequence[Prefix]) -> None:
        """Queue the blocks of these prefixes to be copied, because the prefixes are used again.
        Copies of first blocks stay longest, because later blocks are useless without them.
        """
        if not self._host_pools:
            return
        for prefix in reversed(prefixes):
            for group, slot in enumerate(prefix.slots):
                if slot != NO_BLOCK:
                    self._host_pool(group).touch(slot)
                elif prefix.block_ids[group] != NO_BLOCK:
                    self._wish(prefix, group)

    def watch(self, prefix: Prefix, group: int) -> None:
        """Have a group's block of this prefix copied once it is computed. The prefix must have a
        user.
        """
        self._watches.add((id(prefix), group))

    def unwatch(self, prefix: Prefix, group: int) -> None:
        self._watches.discard((id(prefix), group))

    def _wish(self, prefix: Prefix, group: int) -> None:
        key, block_id = (id(prefix), group), prefix.block_ids[group]
        if key in self._wishes or len(self._wishes) >= _MOST_WISHES:
            return
        cached = self._pools[self._groups[group].pool].cached[block_id]
        # The prefix must outlive its blocks.
        prefix.num_users += 1
        self._wishes[key] = Save(prefix, group, block_id, cached.insertion)

    def cached_blocks(self) -> list[tuple[Prefix, int]]:
        """Return the prefix and group of every cached block and every copy."""
        pools = (*self._pools, *self._host_pools)
        cached = (each for pool in pools for each in pool.cached.values())
        # A block and its copy have the same name: list it once.
        return list(dict.fromkeys((each.prefix, each.group) for each in cached))

    def save_of(self, prefix: Prefix, group: int) -> Save:
        """Return a `Save` of a cached block that is computed, as `take_saves` would."""
        prefix.num_users += 1
        return Save(prefix, group, prefix.block_ids[group], 0)

    def take_saves(self, most: int, computed: int) -> list[Save]:
        """Return the blocks to copy before the next launch, at most `most`, evicted blocks first.
        Blocks with a later insertion than `computed` are left out: they are not computed yet. Each
        prefix gets one more user, until `leave`.
        """
        due = [save for save in self._evictions if save.insertion <= computed]
        for save in self._evictions:
            if save.insertion > computed:
                self.leave(save.prefix)
        self._evictions = []
        for key, save in list(itertools.islice(self._wishes.items(), _LOOKED_AT)):
            if len(due) >= most:
                break
            if save.insertion <= computed:
                due.append(self._wishes.pop(key))
        return due

    def has_free_slot(self, pool: int) -> bool:
        """Tell whether a pool has an unpinned slot."""
        return self._host_pools[pool].num_free > 0

    def take_slot(self, group: int) -> int:
        """Empty the least recently used slot and return it. `keep` fills it."""
        return self._take_slot(self._groups[group].pool)

    def _take_slot(self, number: int) -> int:
        pool = self._host_pools[number]
        slot, cached = pool.take()
        if cached is not None:
            self._forget_copy(cached)
        pool.release([slot])
        return slot

    def keep(self, prefix: Prefix, group: int, slot: int) -> None:
        """Note that an empty slot has a copy now."""
        pool = self._host_pool(group)
        prefix.slots[group] = slot
        pool.cached[slot] = CachedBlock(prefix, group, 0)
        self.held.note(prefix)
        pool.touch(slot)

    def drop(self, prefix: Prefix, group: int) -> None:
        """Uncache a copy and free its slot."""
        pool, slot = self._host_pool(group), prefix.slots[group]
        self._forget_copy(pool.cached.pop(slot))
        pool.refer(slot)
        pool.release([slot])

    @property
    def num_slots(self) -> list[int]:
        return [pool.num_blocks for pool in self._host_pools]

    def has_wishes_for(self, prefixes: Iterable[Prefix]) -> bool:
        """Tell whether blocks of these prefixes wait to be copied."""
        groups = range(len(self._groups))
        return bool(self._wishes) and any(
            (id(prefix), group) in self._wishes for prefix in prefixes for group in groups
        )

    def slots_of(self, found: abc.Sequence[Prefix], num_known: int) -> list[tuple[int, int]]:
        """Return the pool and slot of each copy that the next token sees, parents first. In groups
        that need every block, the first `num_known` blocks are left out.
        """
        slots = []
        for index, prefix in enumerate(found):
            for group, slot in enumerate(prefix.slots):
                if group in self._states:
                    is_seen = index == len(found) - 1
                elif group in self._sliding:
                    is_seen = index >= self.first_visible(group, len(found))
                else:
                    is_seen = index >= num_known
                if is_seen:
                    slots.append((self._groups[group].pool, slot))
        return slots

    def pin(self, pool: int, slot: int) -> None:
        """Keep a slot's contents until `unpin`."""
        self._host_pools[pool].refer(slot)
        self._pins[pool, slot] += 1

    def unpin(self, pool: int, slot: int) -> None:
        self._host_pools[pool].release([slot])
        self._pins[pool, slot] -= 1

    def take_pinned(self, pool: int) -> int:
        """Empty the least recently used slot, pin it and return it."""
        slot = self._take_slot(pool)
        self.pin(pool, slot)
        return slot

    def _forget_copy(self, cached: CachedBlock) -> None:
        cached.prefix.slots[cached.group] = NO_BLOCK
        self.held.note(cached.prefix)
        self._tree.prune(cached.prefix)

    def _host_pool(self, group: int) -> BlockPool:
        return self._host_pools[self._groups[group].pool]

    def check_integrity(self, users: Iterable[Prefix]) -> None:
        """Do as `PrefixTree.check_integrity`, and recount the slots' pins."""
        waiting = (*self._wishes.values(), *self._evictions)
        self._tree.check_integrity([*users, *(save.prefix for save in waiting)])
        for number, pool in enumerate(self._host_pools):
            pins = [self._pins[number, slot] for slot in range(pool.num_blocks)]
            pool.check_integrity(pins, lambda prefix: prefix.slots)


def _runs(group: int, found: abc.Sequence[HasBlocks]) -> list[int]:
    runs = [0]
    for prefix in found:
        runs.append(runs[-1] + 1 if prefix.has(group) else 0)
    return runs
