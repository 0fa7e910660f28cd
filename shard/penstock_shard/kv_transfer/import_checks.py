"""Checks of peers' blocks: this shard also computes the last block of each fetch, and compares it.

That block's deeper layers depend on all earlier blocks, so a change in any of them changes it.
Shards of one namespace compute the same bytes, so any difference means that a peer lies or a
machine errs. The check does not detect consistent blocks of another prompt with the same last
tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from weakref import WeakSet

from penstock_shard.kv_cache.doubt import Doubt, is_proven, is_wrong
from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix
from penstock_shard.kv_transfer.arena import Arena

# At most this many blocks wait to be computed. Sequences that end early never compute theirs.
_MOST_WATCHES = 256


class ImportChecks:
    """Settles doubts about peers' blocks."""

    def __init__(self, arena: Arena, prefixes: PrefixCache, on_lie: Callable[[str], None]) -> None:
        """If a peer's blocks are wrong, uncache them and all blocks computed from them, then call
        `on_lie` with its address.
        """
        self._arena = arena
        self._prefixes = prefixes
        self._on_lie = on_lie
        # For each block to be computed: the checksum of the peer's block, and the doubt to settle.
        # Each prefix has one more user.
        self._watches: dict[tuple[Prefix, int], tuple[int, Doubt]] = {}
        # Doubts that may be open, by source.
        self._doubts: defaultdict[str, WeakSet[Doubt]] = defaultdict(WeakSet)

    def begin(self, source: str) -> Doubt:
        doubt = Doubt(source)
        self._doubts[source].add(doubt)
        return doubt

    def note_copy(self, prefix: Prefix, group: int) -> None:
        """Mark a new copy that is in doubt as unproven, so that a later engine does not use it."""
        doubt = prefix.doubt
        if doubt is not None and not is_proven(doubt):
            pool = self._arena.pool_of(group)
            self._arena.mark(pool, prefix.slots[group], is_proven=False)
            doubt.copies.append((prefix, group))

    def watch(self, prefix: Prefix, doubt: Doubt) -> None:
        """Have the last blocks of a peer's prefix computed here too and compared."""
        for group, slot in enumerate(prefix.slots):
            if slot == NO_BLOCK or (prefix, group) in self._watches:
                continue
            checksum = self._arena.checksum(slot, group)
            self._prefixes.drop(prefix, group)
            prefix.num_users += 1
            self._watches[prefix, group] = checksum, doubt
            self._prefixes.watch(prefix, group)
        while len(self._watches) > _MOST_WATCHES:
            self._forget(next(iter(self._watches)))

    def compare(self, prefix: Prefix, group: int, slot: int) -> None:
        """Compare a block that was computed and copied into a slot, if it is watched."""
        if (prefix, group) not in self._watches:
            return
        checksum, doubt = self._watches[prefix, group]
        self._forget((prefix, group))
        if checksum == self._arena.checksum(slot, group):
            self._prove(doubt)
        else:
            self._disown(doubt)

    def _forget(self, watched: tuple[Prefix, int]) -> None:
        del self._watches[watched]
        self._prefixes.unwatch(*watched)
        self._prefixes.leave(watched[0])

    def _prove(self, doubt: Doubt) -> None:
        for each in doubt.chain():
            each.is_lie = False
            for prefix, group in each.copies:
                if prefix.slots[group] != NO_BLOCK:
                    pool = self._arena.pool_of(group)
                    self._arena.mark(pool, prefix.slots[group], is_proven=True)
            each.copies.clear()

    def _disown(self, doubt: Doubt) -> None:
        """Drop all unproven blocks of all peers in the chain, because the liar is not known."""
        sources = {each.source for each in doubt.chain()}
        for source in sources:
            for each in self._doubts.pop(source, ()):
                each.is_lie = each.is_lie is not False
        self._prefixes.uncache_those(lambda prefix: is_wrong(prefix.doubt))
        for source in sources:
            self._on_lie(source)
