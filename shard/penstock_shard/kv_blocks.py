"""Who holds which KV block: allocation, reference counts, prefix reuse. Plain integers, no torch.

A block is free (nobody refers to it) or referenced by one or more sequences. A full block is cached
under its chained hash and is found after it is freed too, until its memory is needed: freed blocks
are reused least recently freed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

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


class BlockManager:
    """Gives out the blocks 0 .. num_blocks - 1 of `block_size` tokens each."""

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

    def acquire_prefix(self, sequence: Sequence) -> int:
        """Give a sequence, which has no blocks yet, those that hold its longest cached prefix.

        Returns the number of tokens found, which becomes `sequence.num_computed`. The last known
        token is always left to be computed, because sampling needs its logits.
        """
        if not self._enable_prefix_caching:
            return 0
        # All but the last known token, so that the block which holds it is never taken.
        self._hash_full_blocks(sequence, sequence.num_tokens - 1)
        sequence.cached_serial = self._root(sequence)
        for index in range((sequence.num_tokens - 1) // self.block_size):
            block_id = self._find(sequence, index)
            if block_id is None:
                break
            self._refer(block_id)
            sequence.block_ids.append(block_id)
            sequence.cached_serial = self._cached[block_id].serial
        sequence.num_cached_blocks = len(sequence.block_ids)
        sequence.num_computed = len(sequence.block_ids) * self.block_size
        return sequence.num_computed

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for `num_tokens`; False, and no change, if too few are free."""
        missing = self.blocks_for(num_tokens) - len(sequence.block_ids)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            sequence.block_ids.append(self._take())
        return True

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Cache the sequence's full blocks under their hashes, for other sequences to find.

        Steps run in launch order, and each writes keys and values before it reads any: a block may
        be cached as soon as the step that fills it is planned.
        """
        if not self._enable_prefix_caching:
            return
        known = min(sequence.num_computed, len(sequence.token_ids))
        if known < (sequence.num_cached_blocks + 1) * self.block_size:
            return
        self._hash_full_blocks(sequence, known)
        if sequence.num_cached_blocks == 0:
            sequence.cached_serial = self._root(sequence)
        for index in range(sequence.num_cached_blocks, known // self.block_size):
            self._cache_block(sequence, index)
            sequence.num_cached_blocks = index + 1

    def uncache_since(self, since: int) -> None:
        """Uncache what was cached after `num_insertions` was `since`: it was never computed."""
        for block_id, cached in list(self._cached.items()):
            if cached.serial > since:
                del self._cached[block_id]
                del self._by_digest[cached.digest]

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back. The last are reused first: a prefix's start lives longest."""
        for block_id in reversed(sequence.block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
        sequence.block_ids.clear()
        sequence.num_cached_blocks = 0
        sequence.num_computed = 0

    # ---- internals ----

    def _root(self, sequence: Sequence) -> bytes:
        request = sequence.request
        return root_hash(self._weights_hash, request.cache_salt, request.adapter_hash)

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        return tuple(sequence.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _hash_full_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        hashes = sequence.block_hashes
        for index in range(len(hashes), num_tokens // self.block_size):
            parent = hashes[index - 1] if index else self._root(sequence)
            hashes.append(block_hash(parent, self._tokens(sequence, index)))

    def _find(self, sequence: Sequence, index: int) -> int | None:
        """The cached block with block `index` of the sequence's tokens, if it follows the prefix
        that `cached_serial` identifies.
        """
        block_id = self._by_digest.get(sequence.block_hashes[index])
        if block_id is None:
            return None
        cached = self._cached[block_id]
        same = cached.parent_serial == sequence.cached_serial
        return block_id if same and cached.token_ids == self._tokens(sequence, index) else None

    def _cache_block(self, sequence: Sequence, index: int) -> None:
        found = self._find(sequence, index)
        if found is not None:
            # Two sequences computed the same block at once: the first stays cached, and becomes the
            # parent of this sequence's next block.
            sequence.cached_serial = self._cached[found].serial
            return
        digest = sequence.block_hashes[index]
        block_id = sequence.block_ids[index]
        # A block of the same hash that does not match: its parent was evicted, or it is forged.
        stale = self._by_digest.get(digest)
        if stale is not None:
            del self._cached[stale]
        self._insertions += 1
        self._by_digest[digest] = block_id
        self._cached[block_id] = _CachedBlock(
            digest, self._insertions, sequence.cached_serial, self._tokens(sequence, index)
        )
        sequence.cached_serial = self._insertions

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

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recount everything from the sequences that hold blocks.

        Raises:
            AssertionError: the counts do not agree; the text has the numbers.
        """
        counted = [0] * self.num_blocks
        for sequence in sequences:
            for block_id in sequence.block_ids:
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
