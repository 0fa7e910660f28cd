"""Which prefixes are found, in which blocks, and where copies of these are. Plain integers.

Where host memory has slots for copies, a block is copied when its prefix is found a second time, or
when who computed it is preempted. A prefix is found wherever its blocks are, and stays found when
the device needs their memory.
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

# No more blocks wait to be copied: a copy that is not made is computed again.
_MOST_WISHES = 65_536
# So many of those that wait are looked at in a turn.
_LOOKED_AT = 256


@dataclass(slots=True)
class Save:
    """A block that is to be copied; `insertion` is of when it was cached."""

    prefix: Prefix
    group: int
    block_id: int
    insertion: int


class HasBlocks(Protocol):
    """A prefix, of which blocks of some groups are somewhere."""

    def has(self, group: int) -> bool:
        """Whether that of a group is."""


class PrefixCache:
    """Owns the names of what is cached in blocks and copied into slots; the pools say which of
    these are free.
    """

    def __init__(
        self,
        groups: abc.Sequence[CacheGroup],
        pools: abc.Sequence[BlockPool],
        block_size: int,
        host_pools: abc.Sequence[BlockPool] = (),
    ) -> None:
        """`host_pools` are slots for copies of the blocks of each pool."""
        self._groups = groups
        self._host_pools = host_pools
        self._pools = pools
        self._block_size = block_size
        self._states = [i for i, group in enumerate(groups) if group.has_state]
        self._sliding = [i for i, group in enumerate(groups) if group.reach is not None]
        some = {*self._sliding, *self._states}
        # Groups of which a prefix needs every block.
        self._whole = [i for i in range(len(groups)) if i not in some]
        self._tree = PrefixTree(len(groups))
        self.held = HeldPieces(self._tree, groups, pools, block_size)
        # How many times a block has been cached so far.
        self.num_insertions = 0
        # Blocks to be copied, by prefix and group, and those of them whose memory is needed: it is
        # theirs until the next step is launched.
        self._wishes: dict[tuple[int, int], Save] = {}
        self._evictions: list[Save] = []
        self._watches: set[tuple[int, int]] = set()
        # How many need each slot, by pool and number, to stay as it is.
        self._pins: Counter[tuple[int, int]] = Counter()

    # ---- finding ----

    def find(self, root: bytes, names: Iterable[tuple[bytes, tuple[int, ...]]]) -> list[Prefix]:
        """The known prefixes behind a root, from the shortest on, as far as groups that need every
        block have them. A name is a block's chained hash and its tokens.
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
        """How many of them to use: after as many, the next token has all blocks that it sees."""
        # For each group and each number of prefixes, how many of the last have a block.
        runs = [(group, _runs(group, found)) for group in self._sliding]
        count = len(found)
        while count and (
            any(not found[count - 1].has(group) for group in self._states)
            or any(count - run[count] > self.first_visible(group, count) for group, run in runs)
        ):
            count -= 1
        return count

    def first_visible(self, group: int, count: int) -> int:
        """The first block that the token behind so many blocks sees."""
        return self._groups[group].first_visible(count * self._block_size) // self._block_size

    @property
    def slides(self) -> bool:
        """Whether a prefix is found without all of its blocks."""
        return bool(self._sliding or self._states)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def first_needed(self, group: int, count: int) -> int:
        """The first block of a group that a prefix of so many needs."""
        return count - 1 if self._groups[group].has_state else self.first_visible(group, count)

    def is_useful(self, prefix: HasBlocks) -> bool:
        """Whether it has those of groups that need every block."""
        return all(prefix.has(group) for group in self._whole)

    # ---- naming ----

    def root(self, digest: bytes, *, is_salted: bool = False) -> Prefix:
        """The prefix without tokens at which a chain begins."""
        found = self._tree.find(None, digest)
        return found or self._tree.add(None, digest, is_salted=is_salted)

    def child(self, parent: Prefix, digest: bytes, token_ids: tuple[int, ...]) -> Prefix:
        """The prefix of one more block."""
        known = self._tree.find(parent, digest, token_ids)
        if known is not None:
            return known
        return self._tree.add(parent, digest, token_ids, is_salted=parent.is_salted)

    def name(self, prefix: Prefix, group: int, block_id: int, doubt: Doubt | None = None) -> None:
        """The block is cached under the prefix. `doubt` is that of what it was computed on."""
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
        """Nobody finds the block of a prefix, nor its copy: they are wrong."""
        block_id = prefix.block_ids[group]
        if block_id != NO_BLOCK:
            del self._pools[self._groups[group].pool].cached[block_id]
            self._withdraw(prefix, group)
            self.forget(CachedBlock(prefix, group, 0))
        if prefix.slots[group] != NO_BLOCK:
            self.drop(prefix, group)

    def uncache_those(self, is_meant: Callable[[Prefix], bool]) -> None:
        """As `uncache`, of all prefixes that are meant."""
        for prefix, group in self.cached_blocks():
            if is_meant(prefix):
                self.uncache(prefix, group)

    def forget(self, cached: CachedBlock) -> None:
        """The block is no longer cached."""
        cached.prefix.block_ids[cached.group] = NO_BLOCK
        self.held.note(cached.prefix)
        if self._wishes:
            save = self._wishes.pop((id(cached.prefix), cached.group), None)
            if save is not None:
                self._evictions.append(save)
        self._tree.prune(cached.prefix)

    def uncache_since(self, since: int) -> None:
        """Forget what was named after `num_insertions` was `since`: it was never computed."""
        for pool in self._pools:
            for block_id, cached in list(pool.cached.items()):
                if cached.insertion > since:
                    del pool.cached[block_id]
                    self._withdraw(cached.prefix, cached.group)
                    self.forget(cached)

    def _withdraw(self, prefix: Prefix, group: int) -> None:
        """It is not copied, as it is wrong."""
        save = self._wishes.pop((id(prefix), group), None)
        if save is not None:
            self.leave(save.prefix)

    def leave(self, prefix: Prefix) -> None:
        """A user of the prefix is gone."""
        self._tree.leave(prefix)

    # ---- copies in host memory ----

    @property
    def has_copies(self) -> bool:
        """Whether there is room for copies."""
        return bool(self._host_pools)

    @property
    def most_copies(self) -> int:
        """So many blocks of each group have room."""
        sharers = Counter(group.pool for group in self._groups)
        return min(self._host_pools[pool].num_blocks // count for pool, count in sharers.items())

    @property
    def num_copies(self) -> int:
        """Slots with copies."""
        return sum(len(pool.cached) for pool in self._host_pools)

    @property
    def has_wishes(self) -> bool:
        """Whether blocks wait to be copied."""
        return bool(self._wishes or self._evictions)

    def use(self, prefixes: abc.Sequence[Prefix]) -> None:
        """These were found again, or will be: have copies of their blocks. The first stay longest,
        as the later ones are of no use without them.
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
        """Have a copy made of a block of this prefix, which has a user, once one is computed."""
        self._watches.add((id(prefix), group))

    def unwatch(self, prefix: Prefix, group: int) -> None:
        self._watches.discard((id(prefix), group))

    def _wish(self, prefix: Prefix, group: int) -> None:
        key, block_id = (id(prefix), group), prefix.block_ids[group]
        if key in self._wishes or len(self._wishes) >= _MOST_WISHES:
            return
        cached = self._pools[self._groups[group].pool].cached[block_id]
        # It must outlive its blocks.
        prefix.num_users += 1
        self._wishes[key] = Save(prefix, group, block_id, cached.insertion)

    def cached_blocks(self) -> list[tuple[Prefix, int]]:
        """The prefixes and groups of all that is cached in blocks, or copied."""
        pools = (*self._pools, *self._host_pools)
        cached = (each for pool in pools for each in pool.cached.values())
        # Once each: a block and its copy have the same name.
        return list(dict.fromkeys((each.prefix, each.group) for each in cached))

    def save_of(self, prefix: Prefix, group: int) -> Save:
        """A cached block that steps have computed is to be copied; as those of `take_saves`."""
        prefix.num_users += 1
        return Save(prefix, group, prefix.block_ids[group], 0)

    def take_saves(self, most: int, computed: int) -> list[Save]:
        """Blocks to be copied before the next launch, `most` of them besides those that are reused
        by it. Their prefixes have a user more, which leaves by `keep` or `leave`. Steps that are
        over have computed what was cached up to the insertion `computed`.
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
        """Whether not all slots of a pool are pinned."""
        return self._host_pools[pool].num_free > 0

    def take_slot(self, group: int) -> int:
        """The slot that is used least, without what it held, for what `keep` then tells of."""
        return self._take_slot(self._groups[group].pool)

    def _take_slot(self, number: int) -> int:
        pool = self._host_pools[number]
        slot, cached = pool.take()
        if cached is not None:
            self._forget_copy(cached)
        pool.release([slot])
        return slot

    def keep(self, prefix: Prefix, group: int, slot: int) -> None:
        """A slot that held nothing has a copy now."""
        pool = self._host_pool(group)
        prefix.slots[group] = slot
        pool.cached[slot] = CachedBlock(prefix, group, 0)
        self.held.note(prefix)
        pool.touch(slot)

    def drop(self, prefix: Prefix, group: int) -> None:
        """The copy is none: nobody finds it any more."""
        pool, slot = self._host_pool(group), prefix.slots[group]
        self._forget_copy(pool.cached.pop(slot))
        pool.refer(slot)
        pool.release([slot])

    @property
    def num_slots(self) -> list[int]:
        """How many there are in each pool."""
        return [pool.num_blocks for pool in self._host_pools]

    def has_wishes_for(self, prefixes: Iterable[Prefix]) -> bool:
        """Whether blocks of these wait to be copied."""
        groups = range(len(self._groups))
        return bool(self._wishes) and any(
            (id(prefix), group) in self._wishes for prefix in prefixes for group in groups
        )

    def slots_of(self, found: abc.Sequence[Prefix], num_known: int) -> list[tuple[int, int]]:
        """Where copies are of all that the next token sees, but for blocks of whole prefixes before
        `num_known`: pools and slots, parents first.
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
        """A slot stays as it is until `unpin`."""
        self._host_pools[pool].refer(slot)
        self._pins[pool, slot] += 1

    def unpin(self, pool: int, slot: int) -> None:
        self._host_pools[pool].release([slot])
        self._pins[pool, slot] -= 1

    def take_pinned(self, pool: int) -> int:
        """The slot that is used least, without what it held, pinned."""
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
        """As `PrefixTree.check_integrity`, and of slots nobody has one."""
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
