"""Writes all cached blocks to disk when a shard ends, for the next shard."""

from __future__ import annotations

from collections import deque

from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix
from penstock_shard.kv_transfer.disk_tier import DiskTier
from penstock_shard.kv_transfer.host_tier import HostTier


class FinalSaves:
    """A pass over all cached blocks, once no sequence runs. It writes copies in host memory first,
    because other blocks take their slots. It writes the start of a prefix first, because the rest
    needs it.
    """

    def __init__(self, tier: HostTier, prefixes: PrefixCache, disk: DiskTier) -> None:
        self._tier = tier
        self._prefixes = prefixes
        self._disk = disk
        # None before the pass begins.
        self._left: deque[tuple[Prefix, int]] | None = None

    @property
    def has_work(self) -> bool:
        """True if there is something to copy and the disk has room."""
        return (self._left is None or bool(self._left)) and self._disk.has_room

    @property
    def is_over(self) -> bool:
        return self._left is not None and not self._left and not self._disk.is_writing

    def advance(self, most: int) -> None:
        """Save up to `most` more blocks."""
        if self._left is None:
            found = self._prefixes.cached_blocks()
            found.sort(key=lambda block: (block[0].slots[block[1]] == NO_BLOCK, block[0].index))
            self._left = deque(found)
        for _ in range(min(most, len(self._left))):
            if not self._disk.has_room:
                return
            self._save(*self._left.popleft())

    def _save(self, prefix: Prefix, group: int) -> None:
        if self._disk.has(group, prefix.digest):
            return
        if prefix.slots[group] != NO_BLOCK:
            self._tier.write(prefix, group)
        elif prefix.block_ids[group] != NO_BLOCK:
            self._tier.save(self._prefixes.save_of(prefix, group))
