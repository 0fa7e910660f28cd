"""Who holds which KV block: allocation, reference counts, prefix reuse. Plain integers, no torch.

A block is free (nobody refers to it) or referenced by one or more sequences. A full block is cached
under its chained hash and is found after it is freed too, until its memory is needed: freed blocks
are reused least recently freed first.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock_proto.prefix_hash import block_hash, root_hash
from penstock_shard.sequence import Sequence

# What identifies a prefix: the serial of its last cached block, or the root hash when it is empty.
_Serial = int | bytes


@dataclass(frozen=True, slots=True)
class _CachedBlock:
    """What a cached block holds, to compare with on a hit: hashes may collide or be forged.

    The parent is known by its serial and not by its hash, for the same reason.
    """

    digest: bytes
    serial: int
    parent_serial: _Serial
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Table:
    """The blocks of one sequence."""

    block_ids: list[int] = field(default_factory=list)
    # Chained hashes of the full blocks of its tokens, as far as they were needed.
    hashes: list[bytes] = field(default_factory=list)
    # How many of `block_ids` are cached under their hashes, or were found there.
    num_cached: int = 0
    # Serial of the last cached one, or the root hash before the first.
    cached_serial: _Serial = b""


class BlockManager:
    """Owns block tables. Gives out the blocks 0 .. num_blocks - 1 of `block_size` tokens each."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        weights_hash: str = "",
        enable_prefix_caching: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._weights_hash = weights_hash
        self._enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        # Free blocks, the next to be reused first. Values are unused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[int, _CachedBlock] = {}
        self._by_digest: dict[bytes, int] = {}
        self._insertions = 0
        self._tables: dict[Sequence, _Table] = {}
        # What `take_new` has not returned yet.
        self._new_blocks: dict[Sequence, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_insertions(self) -> int:
        """How many times a block has been cached so far."""
        return self._insertions

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    # ---- a sequence's blocks ----

    def blocks_of(self, sequence: Sequence) -> abc.Sequence[int]:
        """Its blocks, in the order of its tokens."""
        table = self._tables.get(sequence)
        return () if table is None else table.block_ids

    def take_new(self, sequences: abc.Collection[Sequence]) -> list[abc.Sequence[int]]:
        """The blocks that each got since this was last asked of it."""
        new_blocks = self._new_blocks
        if not new_blocks:
            return [()] * len(sequences)
        return [
            new_blocks.pop(sequence) if sequence in new_blocks else () for sequence in sequences
        ]

    def acquire_prefix(self, sequence: Sequence) -> int:
        """Give a sequence, which has no blocks yet, those that hold its longest cached prefix.

        Returns the number of tokens found. The last known token is always left to be computed,
        because sampling needs its logits.
        """
        if not self._enable_prefix_caching:
            return 0
        table = self._table(sequence)
        # One block less than all known tokens would allow, so that the last one is computed.
        count = (sequence.num_tokens - 1) // self.block_size
        self._hash_full_blocks(sequence, table, count)
        table.cached_serial = self._root(sequence)
        for index in range(count):
            block_id = self._find(sequence, table, index)
            if block_id is None:
                break
            self._refer(block_id)
            table.block_ids.append(block_id)
            table.cached_serial = self._cached[block_id].serial
        table.num_cached = len(table.block_ids)
        if table.block_ids:
            self._new_blocks[sequence] = list(table.block_ids)
        return len(table.block_ids) * self.block_size

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for `num_tokens`; False, and no change, if too few are free."""
        table = self._table(sequence)
        missing = self.blocks_for(num_tokens) - len(table.block_ids)
        if missing > len(self._free):
            return False
        if missing > 0:
            new = [self._take() for _ in range(missing)]
            table.block_ids += new
            self._new_blocks.setdefault(sequence, []).extend(new)
        return True

    def cache_full_blocks(self, sequences: Iterable[Sequence]) -> None:
        """Cache the sequences' full blocks under their hashes, for others to find.

        Steps run in launch order, and each writes keys and values before it reads any: a block may
        be cached as soon as the step that fills it is planned.
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

    def uncache_since(self, since: int) -> None:
        """Uncache what was cached after `num_insertions` was `since`: it was never computed."""
        for block_id, cached in list(self._cached.items()):
            if cached.serial > since:
                del self._cached[block_id]
                del self._by_digest[cached.digest]

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back. The last are reused first: a prefix's start lives longest."""
        table = self._tables.get(sequence)
        if table is None:
            return
        for block_id in reversed(table.block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
        self._new_blocks.pop(sequence, None)
        # Its hashes are kept: the tokens are the same when it comes again.
        self._tables[sequence] = _Table(hashes=table.hashes)

    def forget(self, sequence: Sequence) -> None:
        """Take all blocks back of a sequence that has ended."""
        self.release(sequence)
        self._tables.pop(sequence, None)

    # ---- internals ----

    def _table(self, sequence: Sequence) -> _Table:
        table = self._tables.get(sequence)
        if table is None:
            table = self._tables[sequence] = _Table()
        return table

    def _root(self, sequence: Sequence) -> bytes:
        request = sequence.request
        return root_hash(self._weights_hash, request.cache_salt, request.adapter_hash)

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        return tuple(sequence.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _hash_full_blocks(self, sequence: Sequence, table: _Table, count: int) -> None:
        """Hash its first `count` blocks, where that has not been done."""
        hashes = table.hashes
        for index in range(len(hashes), count):
            parent = hashes[index - 1] if index else self._root(sequence)
            hashes.append(block_hash(parent, self._tokens(sequence, index)))

    def _find(self, sequence: Sequence, table: _Table, index: int) -> int | None:
        """The cached block with block `index` of the sequence's tokens, if it follows the prefix
        that `cached_serial` identifies.
        """
        block_id = self._by_digest.get(table.hashes[index])
        if block_id is None:
            return None
        cached = self._cached[block_id]
        same = cached.parent_serial == table.cached_serial
        return block_id if same and cached.token_ids == self._tokens(sequence, index) else None

    def _cache_blocks(self, sequence: Sequence, table: _Table, count: int) -> None:
        """Cache its first `count` blocks, as far as they are not."""
        self._hash_full_blocks(sequence, table, count)
        if table.num_cached == 0:
            table.cached_serial = self._root(sequence)
        for index in range(table.num_cached, count):
            self._cache_block(sequence, table, index)
        table.num_cached = count

    def _cache_block(self, sequence: Sequence, table: _Table, index: int) -> None:
        found = self._find(sequence, table, index)
        if found is not None:
            # Two sequences computed the same block at once: the first stays cached, and becomes the
            # parent of this sequence's next block.
            table.cached_serial = self._cached[found].serial
            return
        digest = table.hashes[index]
        block_id = table.block_ids[index]
        # A block of the same hash that does not match: its parent was evicted, or it is forged.
        stale = self._by_digest.get(digest)
        if stale is not None:
            del self._cached[stale]
        self._insertions += 1
        self._by_digest[digest] = block_id
        self._cached[block_id] = _CachedBlock(
            digest, self._insertions, table.cached_serial, self._tokens(sequence, index)
        )
        table.cached_serial = self._insertions

    def _refer(self, block_id: int) -> None:
        if self._references[block_id] == 0:
            del self._free[block_id]
        self._references[block_id] += 1

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        cached = self._cached.pop(block_id, None)
        if cached is not None:
            del self._by_digest[cached.digest]
        self._references[block_id] = 1
        return block_id

    def check_integrity(self) -> None:
        """Recount everything from the block tables.

        Raises:
            AssertionError: the counts do not agree; the text has the numbers.
        """
        counted = [0] * self.num_blocks
        for table in self._tables.values():
            for block_id in table.block_ids:
                counted[block_id] += 1
        wrong = [i for i in range(self.num_blocks) if counted[i] != self._references[i]]
        assert not wrong, (
            f"blocks {wrong[:8]}: counted {[counted[i] for i in wrong[:8]]} references, "
            f"kept {[self._references[i] for i in wrong[:8]]}"
        )
        referenced = sum(1 for count in counted if count)
        assert referenced + len(self._free) == self.num_blocks, (
            f"{referenced} referenced + {len(self._free)} free != {self.num_blocks} blocks"
        )
        assert len(self._by_digest) == len(self._cached), (
            f"{len(self._by_digest)} digests for {len(self._cached)} cached blocks"
        )
