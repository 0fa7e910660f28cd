"""Whether peers send what is computed: some of their blocks are computed here too, and compared.

The last block of each fetch is: what its deeper layers hold depends on all blocks before it, so one
that was changed anywhere shows there. Shards of one namespace compute the same bytes, so any
difference is a peer that lies, or a machine that errs. Not found is a whole that fits together: the
blocks of another prompt which has the same last tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from weakref import WeakSet

from penstock_shard.kv_cache.doubt import Doubt, is_proven, is_wrong
from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix
from penstock_shard.kv_transfer.arena import Arena

# Blocks that wait to be computed; sequences that end before leave some behind.
_MOST_WATCHES = 256


class ImportChecks:
    """Settles doubts of what peers sent."""

    def __init__(self, arena: Arena, prefixes: PrefixCache, on_lie: Callable[[str], None]) -> None:
        """`on_lie` is called with the address of a peer whose blocks are wrong, once nobody finds
        any of them, nor what was computed on them.
        """
        self._arena = arena
        self._prefixes = prefixes
        self._on_lie = on_lie
        # Checksums of blocks that are to be computed, and whose truth they tell. Their prefixes
        # have a user more.
        self._watches: dict[tuple[Prefix, int], tuple[int, Doubt]] = {}
        # All that may be open, by source.
        self._doubts: defaultdict[str, WeakSet[Doubt]] = defaultdict(WeakSet)

    def begin(self, source: str) -> Doubt:
        """Of the blocks of a fetch."""
        doubt = Doubt(source)
        self._doubts[source].add(doubt)
        return doubt

    def note_copy(self, prefix: Prefix, group: int) -> None:
        """A block was put into a slot: if it is in doubt, no later engine finds it until that is
        settled.
        """
        doubt = prefix.doubt
        if doubt is not None and not is_proven(doubt):
            pool = self._arena.pool_of(group)
            self._arena.mark(pool, prefix.slots[group], is_proven=False)
            doubt.copies.append((prefix, group))

    def watch(self, prefix: Prefix, doubt: Doubt) -> None:
        """Have the blocks of a prefix computed, though a peer has sent them, and compared then."""
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
        """A block was computed, and is copied into a slot."""
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
        """Who of several sent the lie is not known: nothing is kept of any of them that is not
        proven.
        """
        sources = {each.source for each in doubt.chain()}
        for source in sources:
            for each in self._doubts.pop(source, ()):
                each.is_lie = each.is_lie is not False
        self._prefixes.uncache_those(lambda prefix: is_wrong(prefix.doubt))
        for source in sources:
            self._on_lie(source)
