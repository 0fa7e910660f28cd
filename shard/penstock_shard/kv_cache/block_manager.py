"""The blocks of each sequence, and the prefixes cached in them.

A sequence has a table of blocks for each cache group. In a group with a window or chunks, a running
sequence gives back blocks that no later token sees. A full block is cached under the prefix that it
ends. A cached prefix can be used if every group has the blocks that the next token sees.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable

from penstock_proto.types import PrefixNames
from penstock_shard.ipc.runner_info import CacheGroup, RunnerInfo, blocks_each
from penstock_shard.kv_cache.block_names import block_tokens, extend_hashes, root_of
from penstock_shard.kv_cache.block_pool import BlockPool
from penstock_shard.kv_cache.block_tables import BlockTable, GroupBlocks, Load
from penstock_shard.kv_cache.doubt import is_proven, is_wrong
from penstock_shard.kv_cache.kept_states import Boundaries
from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix
from penstock_shard.kv_cache.retention import Retention
from penstock_shard.sequence import Sequence

_ONE_GROUP = (CacheGroup(),)


class BlockManager:
    """Owns the block tables and pools. `prefixes` names what is cached in the blocks."""

    def __init__(
        self,
        pools: abc.Sequence[int],
        block_size: int,
        *,
        groups: abc.Sequence[CacheGroup] = _ONE_GROUP,
        max_chunk_tokens: int = 2**31,
        weights_hash: str = "",
        enable_prefix_caching: bool = True,
        state_spacing: int = 512,
        host_slots: abc.Sequence[int] = (),
        retained_share: float = 0.0,
    ) -> None:
        """Make pools of `pools` blocks, each of `block_size` tokens.

        A step computes at most `max_chunk_tokens` of a sequence. States are kept at least every
        `state_spacing` tokens, a multiple of `block_size`. Host memory has `host_slots` slots for
        copies of each pool's blocks. At most `retained_share` of a pool is retained for ended
        requests.
        """
        self.block_size = block_size
        self._groups = tuple(groups)
        self._weights_hash = weights_hash
        self._enable_prefix_caching = enable_prefix_caching
        self._pools = [BlockPool(num_blocks) for num_blocks in pools]
        self._pool_of = [self._pools[group.pool] for group in groups]
        # The largest number of blocks that a sequence has at once in each group.
        self._most = [group.most_blocks(max_chunk_tokens, block_size) for group in groups]
        # Groups that take blocks back while a sequence runs.
        self._sliding = [i for i, group in enumerate(groups) if group.reach is not None]
        self._keeps_images_whole = any(group.bidirectional_images for group in groups)
        # Groups in which a sequence's only block is its state.
        self._states = [i for i, group in enumerate(groups) if group.has_state]
        self._state_spacing = state_spacing
        # Returned by the next `take_state_copies`.
        self._state_copies: list[tuple[int, int]] = []
        # `num_insertions` before the first of `_state_copies`.
        self._num_before_copies = 0
        # Sequences that began at a kept state.
        self.state_hits_total = 0
        host_pools = [BlockPool(count) for count in host_slots]
        self.prefixes = PrefixCache(self._groups, self._pools, block_size, host_pools)
        self.retention = Retention(self.prefixes, self._pools, retained_share)
        self._tables: dict[Sequence, BlockTable] = {}
        # New blocks, by group, until `take_new` returns them.
        self._new_blocks: dict[Sequence, list[list[int]]] = {}

    @classmethod
    def of(
        cls,
        info: RunnerInfo,
        max_chunk_tokens: int,
        *,
        enable_prefix_caching: bool = True,
        host_slots: abc.Sequence[int] = (),
        retained_share: float = 0.0,
    ) -> BlockManager:
        return cls(
            info.pools,
            info.block_size,
            groups=info.cache_groups,
            max_chunk_tokens=max_chunk_tokens,
            weights_hash=info.weights_hash,
            enable_prefix_caching=enable_prefix_caching,
            state_spacing=info.state_spacing,
            host_slots=host_slots,
            retained_share=retained_share,
        )

    def counts(self) -> dict[str, float]:
        return {
            "kept_states": self.num_kept_states,
            "state_hits_total": self.state_hits_total,
            "kv_copied_blocks": self.prefixes.num_copies,
            **self.retention.counts(),
        }

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the scarcest pool has for each of its groups."""
        return blocks_each([pool.num_blocks for pool in self._pools], self._groups)

    @property
    def num_free(self) -> int:
        """Free blocks of the scarcest pool, scaled to `num_blocks`."""
        return min(pool.num_free * self.num_blocks // pool.num_blocks for pool in self._pools)

    @property
    def num_free_unretained(self) -> int:
        return min(pool.num_free_unretained for pool in self._pools)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_kept_states(self) -> int:
        return sum(len(self._pool_of[group].cached) for group in self._states)

    @property
    def num_insertions(self) -> int:
        """The number of blocks cached so far. If the next step copies states, only blocks cached
        before the first of these copies count, because a lost step would never make them.
        """
        return self._num_before_copies if self._state_copies else self.prefixes.num_insertions

    @property
    def slides(self) -> bool:
        """True if sequences give blocks back while they run, or keep states; see `slide`."""
        return bool(self._sliding or self._states)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def free_in(self, pool: int) -> int:
        return self._pools[pool].num_free

    def blocks_of(self, sequence: Sequence, group: int = 0) -> abc.Sequence[int]:
        table = self._tables.get(sequence)
        return () if table is None else table.groups[group].ids[table.groups[group].first :]

    def num_tokens_held(self, sequence: Sequence) -> int:
        """Count the tokens up to the end of the sequence's blocks."""
        table = self._tables.get(sequence)
        if table is None:
            return 0
        groups = zip(self._groups, table.groups, strict=True)
        held = min(len(blocks.ids) for group, blocks in groups if not group.has_state)
        return held * self.block_size

    def take_new(self, sequences: abc.Collection[Sequence]) -> list[list[abc.Sequence[int]]]:
        """Return, by group, the blocks that each sequence got since the last call for it."""
        new_blocks, num_groups = self._new_blocks, len(self._groups)
        if not new_blocks:
            return [[()] * len(sequences) for _ in range(num_groups)]
        none: list[abc.Sequence[int]] = [()] * num_groups
        taken = [new_blocks.pop(sequence, none) for sequence in sequences]
        return [[new[group] for new in taken] for group in range(num_groups)]

    def acquire_prefix(self, sequence: Sequence) -> int:
        """Give a sequence that has no blocks the blocks of its longest cached prefix. For blocks
        that only host memory has, `grow` gives device blocks and `loads_of` lists the copies.

        Returns the number of tokens found. The last known token is always left to be computed,
        because sampling needs its logits.
        """
        if not self._enable_prefix_caching:
            return 0
        table = self._table(sequence)
        found = self._find_chain(sequence, table)
        longest = self._longest(sequence, found)
        if self._states:
            self._mark(sequence, table, len(found))
        del found[longest:]
        if found:
            self.state_hits_total += 1 if self._states else 0
            table.num_cached = len(found)
            table.prefix = found[-1]
            table.prefix.num_users += 1
            table.doubt = table.prefix.doubt
            for group in range(len(self._groups)):
                self._share(sequence, table, group, found)
            self.prefixes.use(found)
        return len(found) * self.block_size

    def acquire_copies(self, sequence: Sequence) -> None:
        """Give a sequence that will not run the blocks of its cached prefix, and blocks into which
        to load copies. Give none if the copies would take over half of the free blocks.
        """
        found = self.acquire_prefix(sequence)
        pool, lacking = self.shortage(sequence, found)
        if 2 * lacking > -self.free_in(pool) or not self.grow(sequence, found):
            self.release(sequence)

    def missing_of(self, sequence: Sequence) -> tuple[PrefixNames, int]:
        """Return the names of the full blocks before the last token, and how many are cached."""
        names, token_ids = self.names_of(sequence), sequence.token_ids
        num_known = self.count_cached(sequence) // self.block_size
        packed = token_ids[: len(names) * self.block_size].tobytes()
        digests = [digest for digest, _ in names]
        return PrefixNames(self.root_of(sequence), digests, packed), num_known

    def count_cached(self, sequence: Sequence) -> int:
        found = self._find_chain(sequence, self._table(sequence))
        return self._longest(sequence, found) * self.block_size

    def slide(self, sequence: Sequence, start: int) -> None:
        """Give back the blocks that no token from `start` on sees, and keep the state if it is due.
        Launched steps may still read these blocks, because a block's next owner writes it in a
        later step.
        """
        table = self._table(sequence)
        for group in self._sliding:
            blocks = table.groups[group]
            first = self._first_visible(group, start)
            if first > blocks.first:
                self._pool_of[group].release(blocks.ids[blocks.first : first])
                blocks.first = first
        if self._states and table.boundaries.has(start):
            self._keep_states(sequence, table, start)

    def shortage(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        """Return the scarcest pool and the number of free blocks that it lacks; 0 or less if it has
        enough.
        """
        table = self._table(sequence)
        shortages = [-pool.num_free for pool in self._pools]
        for group, blocks in enumerate(table.groups):
            shortages[self._groups[group].pool] += self._missing(group, blocks, num_tokens)
        for load in table.loads:
            if load.block_id == NO_BLOCK and not self._groups[load.group].has_state:
                shortages[self._groups[load.group].pool] += 1
        most = max(shortages)
        return shortages.index(most), most

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for `num_tokens`. If too few are free, change nothing and return
        False.

        In a group with a window or chunks, it gets at most the blocks of one step after its last
        `slide`, and the rest later.
        """
        if self.shortage(sequence, num_tokens)[1] > 0:
            return False
        table = self._tables[sequence]
        if table.loads:
            self._take_for_loads(sequence, table)
        for group, blocks in enumerate(table.groups):
            missing = self._missing(group, blocks, num_tokens)
            if missing > 0:
                new = [self._take(self._pool_of[group]) for _ in range(missing)]
                if self._groups[group].has_state:
                    self._begin_state(group, blocks, new[0])
                else:
                    blocks.ids += new
                self._new_of(sequence)[group] += new
        return True

    def loads_of(self, sequence: Sequence) -> abc.Sequence[Load]:
        """Return the copies to load into the sequence's blocks before it runs."""
        table = self._tables.get(sequence)
        return () if table is None else table.loads

    def awaits_loads(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """True if a load for one of `others` is of a block in this sequence's prefix. The block
        will then be cached.
        """
        table = self._table(sequence)
        for loads in map(self.loads_of, others):
            if loads and sequence.num_tokens > (loads[0].prefix.index + 1) * self.block_size:
                self._hash_blocks(sequence, table, loads[0].prefix.index + 1)
                if table.hashes[loads[0].prefix.index] == loads[0].prefix.digest:
                    return True
        return False

    def finish_loads(self, sequence: Sequence) -> None:
        """Cache what was copied into the sequence's blocks."""
        table = self._table(sequence)
        for load in table.loads:
            # Another sequence may have computed the block. A loaded state is not cached, because it
            # will change.
            is_new = load.prefix.block_ids[load.group] == NO_BLOCK
            if is_new and not self._groups[load.group].has_state:
                self.prefixes.name(load.prefix, load.group, load.block_id, load.prefix.doubt)
        table.loads = []

    def is_wrong(self, sequence: Sequence) -> bool:
        """Tell whether a sequence has wrong blocks, or blocks computed from wrong ones."""
        table = self._tables.get(sequence)
        if table is None:
            return False
        return is_wrong(table.doubt) or (table.prefix is not None and is_wrong(table.prefix.doubt))

    def use_prefix(self, sequence: Sequence) -> None:
        """Queue a sequence's cached blocks to be copied to host memory, because it will run
        again.
        """
        if not self.prefixes.has_copies:
            return
        prefix, found = self._table(sequence).prefix, list[Prefix]()
        while prefix is not None and prefix.parent is not None:
            found.append(prefix)
            prefix = prefix.parent
        self.prefixes.use(found[::-1])

    def chunk_limit(self, sequence: Sequence, limit: int) -> int:
        """Return how many tokens, at most `limit`, a step may compute of a sequence. The step ends
        where the state is kept and, for some models, does not divide an image. If the next image
        has more tokens than `limit`, return 0.
        """
        start = sequence.num_computed
        if self._states and self._enable_prefix_caching:
            limit = min(limit, self._table(sequence).boundaries.next_after(start) - start)
        if self._keeps_images_whole:
            limit = sequence.end_outside_images(start + limit) - start
        return limit

    def least_chunk(self, sequence: Sequence, start: int) -> int:
        """Return the smallest number of tokens from `start` on that a step can compute of a
        sequence.
        """
        return max(1, sequence.image_at(start)) if self._keeps_images_whole else 1

    @property
    def has_state_copies(self) -> bool:
        return bool(self._state_copies)

    def take_state_copies(self) -> list[tuple[int, int]]:
        """Return the states that the next step copies first, as (source, target) blocks."""
        copies, self._state_copies = self._state_copies, []
        return copies

    def suffices(self, sequence: Sequence, others: abc.Iterable[Sequence]) -> bool:
        """Tell whether a sequence could get blocks for all its tokens if nothing were cached and
        `others` gave their blocks back.
        """
        free = [pool.num_free for pool in self._pools]
        for other in others:
            for group, blocks in zip(self._groups, self._table(other).groups, strict=True):
                free[group.pool] += len(blocks.ids) - blocks.first
        for group, most in zip(self._groups, self._most, strict=True):
            free[group.pool] -= min(self.blocks_for(sequence.num_tokens), most)
        return min(free) >= 0

    def cache_full_blocks(self, sequences: Iterable[Sequence]) -> None:
        """Cache the sequences' full blocks under their prefixes, for others to find.

        A block may be cached once the step that fills it is planned, because steps run in launch
        order and write keys and values before reading any.
        """
        if not self._enable_prefix_caching:
            return
        block_size, tables = self.block_size, self._tables
        for sequence in sequences:
            table, count = tables[sequence], len(sequence.token_ids)
            if sequence.num_computed < count:
                count = sequence.num_computed
            if count >= (table.num_cached + 1) * block_size:
                self._cache_blocks(sequence, table, count // block_size)

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back. A prefix's first blocks are reused last."""
        table = self._tables.get(sequence)
        if table is None:
            return
        for pool, blocks in zip(self._pool_of, table.groups, strict=True):
            ids = blocks.ids[blocks.first :]
            if table.loads:
                ids = [block_id for block_id in ids if block_id != NO_BLOCK]
            pool.release(reversed(ids))
        self._new_blocks.pop(sequence, None)
        if table.prefix is not None:
            self.prefixes.leave(table.prefix)
        # Keep the hashes: the tokens are the same when the sequence runs again.
        self._tables[sequence] = self._empty_table(table.hashes)

    def forget(self, sequence: Sequence) -> None:
        table = self._tables.get(sequence)
        if table is not None and table.prefix is not None:
            self.retention.note_end(sequence.request, table.prefix)
        self.release(sequence)
        self._tables.pop(sequence, None)

    def retain(self, last: Prefix, until_s: float, priority: int) -> None:
        """Retain a prefix's blocks: they are copied, and reused only after all blocks that are not
        retained.
        """
        self.prefixes.use(self.retention.retain(last, until_s, priority))

    def _empty_table(self, hashes: list[bytes]) -> BlockTable:
        groups = [GroupBlocks() for _ in self._groups]
        return BlockTable(groups, hashes, Boundaries(self._state_spacing))

    def _table(self, sequence: Sequence) -> BlockTable:
        table = self._tables.get(sequence)
        if table is None:
            table = self._tables[sequence] = self._empty_table([])
        return table

    def _new_of(self, sequence: Sequence) -> list[list[int]]:
        new = self._new_blocks.get(sequence)
        if new is None:
            new = self._new_blocks[sequence] = [[] for _ in self._groups]
        return new

    def _missing(self, group: int, blocks: GroupBlocks, num_tokens: int) -> int:
        """Count the blocks that a sequence lacks for `num_tokens`, with at most `_most` in all."""
        if self._groups[group].has_state:
            # A step never writes a state that is kept for others.
            has_own = blocks.ids and blocks.ids[0] not in self._pool_of[group].cached
            return 0 if has_own else 1
        count = min(self.blocks_for(num_tokens), blocks.first + self._most[group])
        return max(0, count - len(blocks.ids))

    def _take_for_loads(self, sequence: Sequence, table: BlockTable) -> None:
        new_blocks = self._new_of(sequence)
        for load in table.loads:
            if load.block_id != NO_BLOCK:
                continue
            pool, ids = self._pool_of[load.group], table.groups[load.group].ids
            load.block_id = self._take(pool)
            if self._groups[load.group].has_state:
                ids.append(load.block_id)
                new_blocks[load.group].append(load.block_id)
            else:
                # So far, all new blocks belong to the found prefix, so a block has the same index
                # in both lists.
                ids[load.index] = new_blocks[load.group][load.index] = load.block_id

    def _first_visible(self, group: int, start: int) -> int:
        return self._groups[group].first_visible(start) // self.block_size

    def _take(self, pool: BlockPool) -> int:
        block_id, cached = pool.take()
        if cached is not None:
            self.prefixes.forget(cached)
        return block_id

    def root_of(self, sequence: Sequence) -> bytes:
        return root_of(sequence, self._weights_hash)

    def names_of(self, sequence: Sequence) -> list[tuple[bytes, tuple[int, ...]]]:
        """Return the chained hash and the tokens of each full block before the last token."""
        count = (sequence.num_tokens - 1) // self.block_size
        table = self._table(sequence)
        self._hash_blocks(sequence, table, count)
        return [(table.hashes[index], self._tokens(sequence, index)) for index in range(count)]

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        return block_tokens(sequence, index, self.block_size)

    def _hash_blocks(self, sequence: Sequence, table: BlockTable, count: int) -> None:
        extend_hashes(table.hashes, sequence, count, self.block_size, self._weights_hash)

    def _find_chain(self, sequence: Sequence, table: BlockTable) -> list[Prefix]:
        """Return the sequence's known prefixes, as `PrefixCache.find` does. The last token is left
        to be computed.
        """
        count = (sequence.num_tokens - 1) // self.block_size
        self._hash_blocks(sequence, table, count)
        names = (
            (digest, self._tokens(sequence, index))
            for index, digest in enumerate(table.hashes[:count])
        )
        return self.prefixes.find(self.root_of(sequence), names)

    def _longest(self, sequence: Sequence, found: list[Prefix]) -> int:
        """Return the length, in blocks, of the longest prefix that the sequence can continue."""
        longest = self.prefixes.longest(found)
        while self._keeps_images_whole:
            end = sequence.end_outside_images(longest * self.block_size) // self.block_size
            if end == longest:
                break
            longest = self.prefixes.longest(found[:end])
        return longest

    def _share(
        self, sequence: Sequence, table: BlockTable, group: int, found: list[Prefix]
    ) -> None:
        blocks, pool = table.groups[group], self._pool_of[group]
        if self._groups[group].has_state:
            kept = found[-1].block_ids[group]
            if kept == NO_BLOCK:
                table.loads.append(Load(found[-1], group, 0, found[-1].slots[group]))
                return
            pool.refer(kept)
            blocks.ids = [kept]
            if not pool.num_free and pool.num_references(kept) == 1:
                # No block is free for a copy, and no other sequence uses the state: take its block.
                self.prefixes.forget(pool.cached.pop(kept))
                self._new_of(sequence)[group].append(kept)
            return
        blocks.first = self._first_visible(group, len(found) * self.block_size)
        # Placeholders for blocks that no token sees.
        blocks.ids = [0] * blocks.first
        for prefix in found[blocks.first :]:
            block_id = prefix.block_ids[group]
            if block_id == NO_BLOCK:
                table.loads.append(Load(prefix, group, len(blocks.ids), prefix.slots[group]))
            else:
                pool.refer(block_id)
            blocks.ids.append(block_id)
        self._new_of(sequence)[group] += blocks.ids

    def _cache_blocks(self, sequence: Sequence, table: BlockTable, count: int) -> None:
        self._hash_blocks(sequence, table, count)
        prefix = before = table.prefix
        if prefix is None:
            is_salted = bool(sequence.request.cache_salt)
            prefix = self.prefixes.root(self.root_of(sequence), is_salted=is_salted)
        for index in range(table.num_cached, count):
            prefix = self._cache_block(sequence, table, prefix, index)
        prefix.num_users += 1
        if before is not None:
            self.prefixes.leave(before)
        table.num_cached, table.prefix = count, prefix

    def _cache_block(
        self, sequence: Sequence, table: BlockTable, parent: Prefix, index: int
    ) -> Prefix:
        """Cache a block of each group. Returns the prefix that ends with these blocks."""
        prefix = self.prefixes.child(parent, table.hashes[index], self._tokens(sequence, index))
        for group, blocks in enumerate(table.groups):
            # If two sequences compute the same block, the first stays cached. A block may be given
            # back before its last token is known.
            is_there = index >= blocks.first and not self._groups[group].has_state
            if prefix.block_ids[group] == NO_BLOCK and is_there:
                doubt = parent.doubt if is_proven(table.doubt) else table.doubt
                self.prefixes.name(prefix, group, blocks.ids[index], doubt)
        return prefix

    def _mark(self, sequence: Sequence, table: BlockTable, num_known: int) -> None:
        """Set where to keep the state: after the last full block and at the known prefix's end."""
        last = (sequence.num_tokens - 1) // self.block_size
        others = {num_known * self.block_size, last * self.block_size}
        table.boundaries = Boundaries(self._state_spacing, others)

    def _begin_state(self, group: int, blocks: GroupBlocks, own: int) -> None:
        """Give a sequence a block for its state, with a copy of the kept state if it found one."""
        if blocks.ids:
            self._copy_state(blocks.ids[0], own)
            self._pool_of[group].release(blocks.ids)
        blocks.ids = [own]

    def _keep_states(self, sequence: Sequence, table: BlockTable, start: int) -> None:
        """Keep the state after `start` tokens if a block is free. Launched steps compute these
        tokens.
        """
        count = start // self.block_size
        if not self._enable_prefix_caching or len(sequence.token_ids) < start:
            return
        if table.num_cached < count:
            self._cache_blocks(sequence, table, count)
        for group in self._states:
            pool, blocks, prefix = self._pool_of[group], table.groups[group], table.prefix
            if prefix is None or table.num_cached != count or not pool.num_free:
                continue
            if prefix.block_ids[group] == NO_BLOCK and blocks.ids:
                kept = self._take(pool)
                self._copy_state(blocks.ids[0], kept)
                self.prefixes.name(prefix, group, kept)
                pool.release([kept])

    def _copy_state(self, source: int, target: int) -> None:
        if not self._state_copies:
            self._num_before_copies = self.prefixes.num_insertions
        self._state_copies.append((source, target))

    def check_integrity(self) -> None:
        """Recount everything from the block tables.

        Raises:
            AssertionError: the counts do not agree. The text has the numbers.
        """
        counted = {id(pool): [0] * pool.num_blocks for pool in self._pools}
        for table in self._tables.values():
            for pool, blocks in zip(self._pool_of, table.groups, strict=True):
                for block_id in blocks.ids[blocks.first :]:
                    counted[id(pool)][block_id] += 1
        for pool in self._pools:
            pool.check_integrity(counted[id(pool)])
        tables = self._tables.values()
        self.prefixes.check_integrity(table.prefix for table in tables if table.prefix is not None)
