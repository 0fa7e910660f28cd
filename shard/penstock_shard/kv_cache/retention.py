"""Retains prefixes of ended requests while their clients run tools: other free blocks are reused
first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock_proto.engine_request import EngineRequest
from penstock_shard.kv_cache.block_pool import BlockPool
from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix

# Clients may still send a hint for at most this many ended requests.
_MOST_ENDED = 4096
_MOST_RETAINED = 16_384
# Ended entries are removed from a queue that has this many more entries than twice the live ones.
_MOST_OVER = 64
# Priority, and end of retention.
_Rank = tuple[int, float]


class Ended(NamedTuple):
    """An ended request's longest cached prefix, and the salt of its blocks' names."""

    prefix: Prefix
    cache_salt: str
    # True if the names depend only on tokens and salt.
    is_plain: bool


@dataclass(eq=False, slots=True)
class _Retained:
    """A retained prefix, `of`. Its blocks are retained up to the end of `held`, which is `of` or an
    ancestor.
    """

    of: Prefix
    held: Prefix
    priority: int
    until_s: float

    @property
    def rank(self) -> _Rank:
        """The entry with the lowest rank makes room first."""
        return self.priority, self.until_s


class Retention:
    """Retains the blocks of prefixes within a share of each pool, each prefix until its own time.
    If the share is full, the prefix with the lowest priority makes room; among equal priorities,
    the one whose time ends first.
    """

    def __init__(self, prefixes: PrefixCache, pools: abc.Sequence[BlockPool], share: float) -> None:
        self._prefixes = prefixes
        self._pools = pools
        self._most = [int(share * pool.num_blocks) for pool in pools]
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        # Prefixes that `_ended` keeps in memory; their blocks may be gone.
        self._num_kept = 0
        self._retained: dict[Prefix, _Retained] = {}
        # Heaps of live and ended entries, by time of release and by rank. Between equal entries,
        # the number decides.
        self._due: list[tuple[float, int, _Retained]] = []
        self._ranked: list[tuple[_Rank, int, _Retained]] = []
        self._numbers = itertools.count()

    def counts(self) -> dict[str, float]:
        return {
            "kv_retained_blocks": self.num_blocks,
            "kv_retained_taken_total": self.taken_total,
        }

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_retained for pool in self._pools)

    @property
    def taken_total(self) -> int:
        """Retained blocks that were reused because no other was free."""
        return sum(pool.retained_taken_total for pool in self._pools)

    @property
    def due_at_s(self) -> float | None:
        """Time of the next release; None if nothing is retained."""
        return self._due[0][0] if self._due else None

    def note_end(self, request: EngineRequest, prefix: Prefix) -> None:
        """Note an ended request's longest cached prefix. Forget the oldest requests while all noted
        prefixes have more blocks than the pools.
        """
        if not any(self._most) or request.only_fetches:
            return
        self._forget(request.request_id)
        is_plain = not (request.adapter or request.images)
        self._ended[request.request_id] = Ended(prefix, request.cache_salt, is_plain)
        self._num_kept += prefix.index + 1
        most = sum(pool.num_blocks for pool in self._pools)
        while len(self._ended) > _MOST_ENDED or self._num_kept > most:
            self._forget(next(iter(self._ended)))

    def _forget(self, request_id: str) -> None:
        ended = self._ended.pop(request_id, None)
        if ended is not None:
            self._num_kept -= ended.prefix.index + 1

    def ended(self, request_id: str) -> Ended | None:
        return self._ended.get(request_id)

    def retain(self, last: Prefix, until_s: float, priority: int) -> list[Prefix]:
        """Retain a prefix's blocks from its start on, while the share has room; in a group with a
        window, only blocks that the next token sees. Returns the retained prefixes, shortest first;
        none if the prefix is already retained for as long at this priority.
        """
        before = self._retained.get(last)
        if before is not None:
            if before.until_s >= until_s and before.priority >= priority:
                return []
            until_s, priority = max(until_s, before.until_s), max(priority, before.priority)
        return self._retain_chain(last, until_s, priority)

    def renew(self, last: Prefix) -> None:
        """Retain a retained prefix again, because it has got more blocks."""
        before = self._retained.get(last)
        if before is not None:
            self._retain_chain(last, before.until_s, before.priority)

    def let_go(self, now_s: float) -> None:
        """Release the prefixes that have reached their time."""
        while self._due and self._due[0][0] <= now_s:
            self._end(heapq.heappop(self._due)[-1])

    def _retain_chain(self, last: Prefix, until_s: float, priority: int) -> list[Prefix]:
        retained: list[Prefix] = []
        before = self._retained.get(last)
        if before is None and len(self._retained) >= _MOST_RETAINED:
            return retained
        chain = list(last.chain())[::-1]
        first = [self._prefixes.first_needed(group, len(chain)) for group in self._groups]
        for prefix in chain:
            # Hold the prefix first: otherwise an entry that makes room might release its blocks.
            self._hold(prefix)
            if not self._retain(prefix, first, (priority, until_s)):
                self._release(prefix)
                break
            if retained:
                self._release(retained[-1])
            retained.append(prefix)
        # The start of a prefix is reused last, because the rest is useless without it.
        for prefix in reversed(retained):
            for pool, block in self._places(prefix):
                pool.touch(block)
        if before is not None:
            self._end(before)
        while self._due and not self._has(self._due[0][-1]):
            heapq.heappop(self._due)
        if retained:
            self._enter(_Retained(last, retained[-1], priority, until_s))
        return retained

    def _enter(self, entry: _Retained) -> None:
        self._retained[entry.of] = entry
        number = next(self._numbers)
        heapq.heappush(self._due, (entry.until_s, number, entry))
        heapq.heappush(self._ranked, (entry.rank, number, entry))
        if max(len(self._due), len(self._ranked)) > 2 * len(self._retained) + _MOST_OVER:
            self._due = [each for each in self._due if self._has(each[-1])]
            self._ranked = [each for each in self._ranked if self._has(each[-1])]
            heapq.heapify(self._due)
            heapq.heapify(self._ranked)

    def _has(self, entry: _Retained) -> bool:
        return self._retained.get(entry.of) is entry

    def _end(self, entry: _Retained) -> None:
        """Release a prefix, except blocks that it shares with another retained prefix."""
        if not self._has(entry):
            return
        del self._retained[entry.of]
        self._release(entry.held)

    def _hold(self, last: Prefix) -> None:
        """Add a holder to a prefix. With its first holder, the prefix becomes a holder of its
        parent.
        """
        for prefix in last.chain():
            prefix.num_retained += 1
            if prefix.num_retained > 1:
                break

    def _release(self, last: Prefix) -> None:
        """Remove a holder of a prefix, and release the blocks of prefixes that then have none."""
        for prefix in last.chain():
            prefix.num_retained -= 1
            if prefix.num_retained:
                break
            for pool, block in self._places(prefix):
                pool.let_go(block)

    def _retain(self, prefix: Prefix, first: abc.Sequence[int], rank: _Rank) -> bool:
        """Retain the needed blocks of one prefix, all or none. Return False if the share is full of
        entries that rank at least as high.
        """
        new: list[tuple[BlockPool, int]] = []
        for group, block in enumerate(prefix.block_ids):
            pool = self._pools[self._prefixes.pool_of(group)]
            if block == NO_BLOCK or prefix.index < first[group] or pool.is_retained(block):
                continue
            if not self._make_room(pool, rank):
                for other, taken in new:
                    other.let_go(taken)
                return False
            pool.retain(block)
            new.append((pool, block))
        return True

    def _make_room(self, pool: BlockPool, rank: _Rank) -> bool:
        most = self._most[self._pools.index(pool)]
        while pool.num_retained >= most:
            if not self._ranked or self._ranked[0][0] >= rank:
                return False
            self._end(heapq.heappop(self._ranked)[-1])
        return True

    @property
    def _groups(self) -> range:
        return range(self._prefixes.num_groups)

    def _places(self, prefix: Prefix) -> Iterator[tuple[BlockPool, int]]:
        for group, block in enumerate(prefix.block_ids):
            if block != NO_BLOCK:
                yield self._pools[self._prefixes.pool_of(group)], block
