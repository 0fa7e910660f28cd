"""Who holds which KV block: allocation, reference counts, prefix reuse. Plain integers, no torch.

A block is free (nobody refers to it) or referenced by one or more requests. A full block is cached
under its chained hash and is found after it is freed too, until its memory is needed: freed blocks
are reused least recently freed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from penstock_proto.prefix_hash import block_hash, root_hash
from penstock_shard.request import Request

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

    # ---- a request's blocks ----

    def acquire_prefix(self, request: Request) -> int:
        """Give a request, which has no blocks yet, those that hold its longest cached prefix.

        Returns the number of tokens found, which becomes `request.num_computed`. The last known
        token is always left to be computed, because sampling needs its logits.
        """
        if not self._enable_prefix_caching:
            return 0
        # All but the last known token, so that the block which holds it is never taken.
        self._hash_full_blocks(request, request.num_tokens - 1)
        request.cached_serial = self._root(request)
        for index in range((request.num_tokens - 1) // self.block_size):
            block_id = self._find(request, index)
            if block_id is None:
                break
            self._refer(block_id)
            request.block_ids.append(block_id)
            request.cached_serial = self._cached[block_id].serial
        request.num_cached_blocks = len(request.block_ids)
        request.num_computed = len(request.block_ids) * self.block_size
        return request.num_computed

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give the request blocks for `num_tokens`; False, and no change, if too few are free."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            request.block_ids.append(self._take())
        return True

    def cache_full_blocks(self, request: Request) -> None:
        """Cache the request's full blocks under their hashes, for other requests to find.

        Steps run in launch order, and each writes keys and values before it reads any: a block may
        be cached as soon as the step that fills it is planned.
        """
        if not self._enable_prefix_caching:
            return
        known = min(request.num_computed, len(request.token_ids))
        if known < (request.num_cached_blocks + 1) * self.block_size:
            return
        self._hash_full_blocks(request, known)
        if request.num_cached_blocks == 0:
            request.cached_serial = self._root(request)
        for index in range(request.num_cached_blocks, known // self.block_size):
            self._cache_block(request, index)
            request.num_cached_blocks = index + 1

    def uncache_since(self, since: int) -> None:
        """Uncache what was cached after `num_insertions` was `since`: it was never computed."""
        for block_id, cached in list(self._cached.items()):
            if cached.serial > since:
                del self._cached[block_id]
                del self._by_digest[cached.digest]

    def release(self, request: Request) -> None:
        """Take all blocks back. The last are reused first: a prefix's start lives longest."""
        for block_id in reversed(request.block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
        request.block_ids.clear()
        request.num_cached_blocks = 0
        request.num_computed = 0

    # ---- internals ----

    def _root(self, request: Request) -> bytes:
        return root_hash(self._weights_hash, request.cache_salt, request.adapter)

    def _tokens(self, request: Request, index: int) -> tuple[int, ...]:
        return tuple(request.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _hash_full_blocks(self, request: Request, num_tokens: int) -> None:
        hashes = request.block_hashes
        for index in range(len(hashes), num_tokens // self.block_size):
            parent = hashes[index - 1] if index else self._root(request)
            hashes.append(block_hash(parent, self._tokens(request, index)))

    def _find(self, request: Request, index: int) -> int | None:
        """The cached block with block `index` of the request's tokens, if it follows the prefix
        that `cached_serial` identifies.
        """
        block_id = self._by_digest.get(request.block_hashes[index])
        if block_id is None:
            return None
        cached = self._cached[block_id]
        same = cached.parent_serial == request.cached_serial
        return block_id if same and cached.token_ids == self._tokens(request, index) else None

    def _cache_block(self, request: Request, index: int) -> None:
        found = self._find(request, index)
        if found is not None:
            # Two requests computed the same block at once: the first stays cached, and becomes the
            # parent of this request's next block.
            request.cached_serial = self._cached[found].serial
            return
        digest = request.block_hashes[index]
        block_id = request.block_ids[index]
        # A block of the same hash that does not match: its parent was evicted, or it is forged.
        stale = self._by_digest.get(digest)
        if stale is not None:
            del self._cached[stale]
        self._insertions += 1
        self._by_digest[digest] = block_id
        self._cached[block_id] = _CachedBlock(
            digest, self._insertions, request.cached_serial, self._tokens(request, index)
        )
        request.cached_serial = self._insertions

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

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Recount everything from the requests that hold blocks.

        Raises:
            AssertionError: the counts do not agree; the text has the numbers.
        """
        counted = [0] * self.num_blocks
        for request in requests:
            for block_id in request.block_ids:
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
