"""Which prefixes are found, and in which blocks. Plain integers, no torch."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable

from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_cache.block_pool import BlockPool, CachedBlock
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix, PrefixTree


class PrefixCache:
    """Owns the names of what is cached in blocks; the pools say which of these are free."""

    def __init__(
        self, groups: abc.Sequence[CacheGroup], pools: abc.Sequence[BlockPool], block_size: int
    ) -> None:
        self._groups = groups
        self._pools = pools
        self._block_size = block_size
        self._states = [i for i, group in enumerate(groups) if group.has_state]
        self._sliding = [i for i, group in enumerate(groups) if group.reach is not None]
        some = {*self._sliding, *self._states}
        # Groups of which a prefix needs every block.
        self._whole = [i for i in range(len(groups)) if i not in some]
        self._tree = PrefixTree(len(groups))
        # How many times a block has been cached so far.
        self.num_insertions = 0

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
            parent = self._tree.find(parent, digest, token_ids)
            if parent is None or any(not parent.has(group) for group in self._whole):
                break
            found.append(parent)
        return found

    def longest(self, found: list[Prefix]) -> int:
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

    # ---- naming ----

    def root(self, digest: bytes) -> Prefix:
        """The prefix without tokens at which a chain begins."""
        return self._tree.find(None, digest) or self._tree.add(None, digest)

    def child(self, parent: Prefix, digest: bytes, token_ids: tuple[int, ...]) -> Prefix:
        """The prefix of one more block."""
        known = self._tree.find(parent, digest, token_ids)
        return self._tree.add(parent, digest, token_ids) if known is None else known

    def name(self, prefix: Prefix, group: int, block_id: int) -> None:
        """The block is cached under the prefix."""
        prefix.block_ids[group] = block_id
        self.num_insertions += 1
        pool = self._pools[self._groups[group].pool]
        pool.cached[block_id] = CachedBlock(prefix, group, self.num_insertions)

    def forget(self, cached: CachedBlock) -> None:
        """The block is no longer cached."""
        cached.prefix.block_ids[cached.group] = NO_BLOCK
        self._tree.prune(cached.prefix)

    def uncache_since(self, since: int) -> None:
        """Forget what was named after `num_insertions` was `since`: it was never computed."""
        for pool in self._pools:
            for block_id, cached in list(pool.cached.items()):
                if cached.insertion > since:
                    del pool.cached[block_id]
                    self.forget(cached)

    def leave(self, prefix: Prefix) -> None:
        """A user of the prefix is gone."""
        self._tree.leave(prefix)

    def check_integrity(self, users: Iterable[Prefix]) -> None:
        """As `PrefixTree.check_integrity`."""
        self._tree.check_integrity(users)


def _runs(group: int, found: list[Prefix]) -> list[int]:
    runs = [0]
    for prefix in found:
        runs.append(runs[-1] + 1 if prefix.has(group) else 0)
    return runs
