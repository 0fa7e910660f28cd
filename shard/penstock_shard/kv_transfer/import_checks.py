"""Whether peers send what is computed: some of their blocks are computed here too, and compared.

The last block of each fetch is: what its deeper layers hold depends on all blocks before it, so one
that was changed anywhere shows there. Shards of one namespace compute the same bytes, so any
difference is a peer that lies, or a machine that errs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix
from penstock_shard.kv_transfer.arena import Arena

# Blocks that wait to be computed; sequences that end before leave some behind.
_MOST_WATCHES = 256
# Of each peer, so many of its latest blocks are known to be its.
_MOST_REMEMBERED = 65_536


class ImportChecks:
    """Owns what is known of blocks by the peer that they came from."""

    def __init__(self, arena: Arena, prefixes: PrefixCache, on_lie: Callable[[str], None]) -> None:
        """`on_lie` is called with the address of a peer whose block differs, once nobody finds any
        of its blocks.
        """
        self._arena = arena
        self._prefixes = prefixes
        self._on_lie = on_lie
        # Checksums of blocks that are to be computed, and who sent them. Their prefixes have a user
        # more.
        self._watches: dict[tuple[Prefix, int], tuple[int, str]] = {}
        # What came of each peer, the latest last. Values are unused.
        self._of: defaultdict[str, dict[tuple[Prefix, int], None]] = defaultdict(dict)

    def note(self, prefix: Prefix, group: int, source: str) -> None:
        """A block of a peer was taken over."""
        blocks = self._of[source]
        blocks[prefix, group] = None
        if len(blocks) > _MOST_REMEMBERED:
            del blocks[next(iter(blocks))]

    def is_foreign(self, prefix: Prefix, group: int) -> bool:
        """Whether the copy of a block came from a peer."""
        return any((prefix, group) in blocks for blocks in self._of.values())

    def watch(self, prefix: Prefix, source: str) -> None:
        """Have the blocks of a prefix computed, though a peer has sent them, and compared then."""
        for group, slot in enumerate(prefix.slots):
            if slot == NO_BLOCK:
                continue
            checksum = self._arena.checksum(slot, group)
            self._prefixes.drop(prefix, group)
            prefix.num_users += 1
            self._watches[prefix, group] = checksum, source
            self._prefixes.watch(prefix, group)
        while len(self._watches) > _MOST_WATCHES:
            self._forget(next(iter(self._watches)))

    def compare(self, prefix: Prefix, group: int, slot: int) -> None:
        """A block was computed, and is copied into a slot."""
        if (prefix, group) not in self._watches:
            return
        checksum, source = self._watches[prefix, group]
        self._forget((prefix, group))
        if checksum == self._arena.checksum(slot, group):
            self._prove(prefix)
        else:
            self._disown(source)
            self._on_lie(source)

    def _prove(self, prefix: Prefix | None) -> None:
        """A block is what is computed here, and so are all before it, which it depends on."""
        while prefix is not None:
            for group, slot in enumerate(prefix.slots):
                if slot != NO_BLOCK:
                    self._arena.mark(self._arena.pool_of(group), slot, is_proven=True)
                for blocks in self._of.values():
                    blocks.pop((prefix, group), None)
            prefix = prefix.parent

    def _forget(self, watched: tuple[Prefix, int]) -> None:
        del self._watches[watched]
        self._prefixes.unwatch(*watched)
        self._prefixes.leave(watched[0])

    def _disown(self, source: str) -> None:
        """Nobody finds what came from there any more."""
        for prefix, group in self._of.pop(source, ()):
            self._prefixes.uncache(prefix, group)
