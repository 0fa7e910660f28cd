"""Blocks from other shards: compared with the request, then cached like copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock_proto.types import PrefixNames
from penstock_shard.ipc.block_messages import InboundSlots, Slot
from penstock_shard.kv_cache.doubt import Doubt, is_proven
from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import Prefix
from penstock_shard.kv_transfer.arena import Arena, RecordName
from penstock_shard.kv_transfer.exports import names_of
from penstock_shard.kv_transfer.import_checks import ImportChecks

# The server may write into 1/_SHARE of the slots of a pool.
_SHARE = 8


@dataclass(slots=True)
class FetchProgress:
    """The progress of a fetch of `names`. The shard already has the first `num_known` blocks.
    `prefix` is the longest prefix with a block that has arrived; it has one more user until
    `Fetches.end`.
    """

    root: bytes
    names: list[tuple[bytes, tuple[int, ...]]]
    num_known: int
    prefix: Prefix
    doubt: Doubt

    def parent_of(self, index: int) -> bytes:
        return self.names[index - 1][0] if index else self.root


class Fetches:
    """Takes over slots that the server has written, and gives it other slots."""

    def __init__(
        self,
        arena: Arena,
        prefixes: PrefixCache,
        block_size: int,
        send: Callable[[InboundSlots], None],
        checks: ImportChecks,
    ) -> None:
        self._checks = checks
        self._arena = arena
        self._prefixes = prefixes
        self._block_size = block_size
        self._send = send
        # Blocks since the engine's start: taken over; refused as damaged or not asked for.
        self.fetched_total = 0
        self.refused_total = 0

    def counts(self) -> dict[str, float]:
        return {
            "kv_fetched_blocks_total": self.fetched_total,
            "kv_refused_blocks_total": self.refused_total,
        }

    def give_slots(self) -> None:
        """Give the server its first slots: at least one of each pool that has two or more."""
        slots = [
            (pool, self._prefixes.take_pinned(pool))
            for pool, count in enumerate(self._arena.num_slots)
            for _ in range(min(count - 1, max(1, count // _SHARE)))
        ]
        self._send(InboundSlots(slots))

    @property
    def most_blocks(self) -> int:
        """The largest number of blocks of each group that one fetch can bring; may be 0."""
        if min(self._arena.num_slots) < 2:
            return 0
        return self._prefixes.most_copies * (_SHARE - 1) // _SHARE

    def begin(
        self, source: str, names: PrefixNames, num_known: int, *, is_salted: bool
    ) -> FetchProgress:
        prefix = self._prefixes.root(names.root, is_salted=is_salted)
        prefix.num_users += 1
        blocks, doubt = names_of(names, self._block_size), self._checks.begin(source)
        return FetchProgress(names.root, blocks, num_known, prefix, doubt)

    def end(self, progress: FetchProgress) -> None:
        """End a fetch. If the last block that arrived is in doubt, it will be computed and
        compared.
        """
        if progress.prefix.doubt is progress.doubt:
            self._checks.watch(progress.prefix, progress.doubt)
        self._prefixes.leave(progress.prefix)

    def take(self, progress: FetchProgress | None, slots: list[Slot]) -> None:
        """Take over written slots, parents first. Without `progress`, no request wants them."""
        given = [self._take(progress, pool, slot) for pool, slot in slots]
        if given:
            self._send(InboundSlots(given))

    def _take(self, progress: FetchProgress | None, pool: int, slot: int) -> Slot:
        """Take over one slot. Returns the slot that the server gets instead."""
        name = self._arena.name_in(pool, slot)
        if progress is None or name is None or not self._is_asked_for(progress, name):
            self.refused_total += progress is not None
            self._arena.clear(pool, slot)
            return pool, slot
        prefix = self._prefix_at(progress, name.index)
        if prefix.has(name.group) or not self._prefixes.has_free_slot(pool):
            self._arena.clear(pool, slot)
            return pool, slot
        other = self._prefixes.take_pinned(pool)
        self._prefixes.unpin(pool, slot)
        self._prefixes.keep(prefix, name.group, slot)
        self._doubt(prefix, name.group, progress.doubt)
        self.fetched_total += 1
        return pool, other

    def _doubt(self, prefix: Prefix, group: int, doubt: Doubt) -> None:
        """Put a block in doubt until its fetch is settled. With groups that have a window, chunks
        or states, no check would settle the doubt, so count the block as proven.
        """
        if self._prefixes.slides:
            pool = self._arena.pool_of(group)
            self._arena.mark(pool, prefix.slots[group], is_proven=True)
            return
        before = None if prefix.parent is None else prefix.parent.doubt
        if before is not doubt and not is_proven(before):
            doubt.before = before
        prefix.doubt = doubt
        self._checks.note_copy(prefix, group)

    def _is_asked_for(self, progress: FetchProgress, name: RecordName) -> bool:
        first = max(progress.prefix.index, 0 if self._prefixes.slides else progress.num_known)
        if not first <= name.index < len(progress.names):
            return False
        wanted = (*progress.names[name.index], progress.parent_of(name.index))
        found = (name.digest, name.token_ids, name.parent)
        return found == wanted and name.is_salted == progress.prefix.is_salted

    def _prefix_at(self, progress: FetchProgress, index: int) -> Prefix:
        while progress.prefix.index < index:
            before = progress.prefix
            progress.prefix = self._prefixes.child(before, *progress.names[before.index + 1])
            progress.prefix.num_users += 1
            self._prefixes.leave(before)
        return progress.prefix
