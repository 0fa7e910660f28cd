"""Changes to the prefix pieces that a shard holds, for routing.

Only a piece's name is noted; its tier is looked up when the change is taken. The tier depends only
on the cache groups in which a prefix needs every block; if there are none, on the first group.
"""

from __future__ import annotations

from collections import abc
from typing import Protocol

from penstock_proto.prefix_hash import Tier, piece_blocks, piece_name
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_cache.block_pool import BlockPool
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix, PrefixTree

# At most this many pieces are looked at in a turn, which then takes a millisecond.
_MOST_TAKEN = 1024


class Disk(Protocol):
    """Copies on disk, which the prefix tree does not know."""

    @property
    def has_changes(self) -> bool:
        """True if `take_changes` would return some."""

    def has(self, group: int, digest: bytes) -> bool:
        """Tell whether the disk has a block."""

    def take_changes(self, most: int) -> list[tuple[int, bytes]]:
        """Return at most `most` blocks that were written or deleted, each as its index in the
        prefix and its hash.
        """


class HeldPieces:
    """Owns the names of changed pieces until they are taken, after each step."""

    def __init__(
        self,
        tree: PrefixTree,
        groups: abc.Sequence[CacheGroup],
        pools: abc.Sequence[BlockPool],
        block_size: int,
    ) -> None:
        self._tree = tree
        self._pool_of = [pools[group.pool] for group in groups]
        whole = [i for i, each in enumerate(groups) if each.reach is None and not each.has_state]
        self._groups = whole or [0]
        self._each = piece_blocks(block_size)
        self._changed: dict[bytes, None] = {}
        # Names of pieces with blocks that a step in flight fills.
        self._uncomputed: list[bytes] = []
        self.disk: Disk | None = None

    @property
    def has_changes(self) -> bool:
        """True if `take` would return something now."""
        return bool(self._changed) or (self.disk is not None and self.disk.has_changes)

    @property
    def has_untold(self) -> bool:
        """True if `take` would return something now or after another step."""
        return bool(self._uncomputed) or self.has_changes

    def note(self, prefix: Prefix) -> None:
        """Note that a block of this prefix, or a copy, was added or removed."""
        if (prefix.index + 1) % self._each == 0:
            self._changed[prefix.digest] = None

    def take(self, computed: int) -> dict[int, int]:
        """Return the tiers of at most `_MOST_TAKEN` changed pieces, by name. Changes of blocks with
        a later insertion than `computed` wait, because these blocks are not computed yet.
        """
        if self.disk is not None and self.disk.has_changes:
            for index, digest in self.disk.take_changes(_MOST_TAKEN):
                if (index + 1) % self._each == 0:
                    self._changed[digest] = None
        digests = self._uncomputed
        while self._changed and len(digests) < _MOST_TAKEN:
            digests.append(self._changed.popitem()[0])
        self._uncomputed = []
        taken: dict[int, int] = {}
        for digest in digests:
            prefix = self._tree.named(digest)
            if prefix is not None and not self._is_computed(prefix, computed):
                self._uncomputed.append(digest)
            else:
                taken[piece_name(digest)] = self._tier(digest, prefix)
        return taken

    def _is_computed(self, prefix: Prefix, computed: int) -> bool:
        for group in self._groups:
            block_id = prefix.block_ids[group]
            if block_id != NO_BLOCK and self._pool_of[group].cached[block_id].insertion > computed:
                return False
        return True

    def _tier(self, digest: bytes, prefix: Prefix | None) -> Tier:
        """Return the slowest tier of the prefix's blocks, over the groups."""
        return max(self._tier_in(group, digest, prefix) for group in self._groups)

    def _tier_in(self, group: int, digest: bytes, prefix: Prefix | None) -> Tier:
        if prefix is not None and prefix.block_ids[group] != NO_BLOCK:
            return Tier.DEVICE
        if prefix is not None and prefix.slots[group] != NO_BLOCK:
            return Tier.HOST
        is_on_disk = self.disk is not None and self.disk.has(group, digest)
        return Tier.DISK if is_on_disk else Tier.GONE
