"""Copies a runner's blocks to host memory and back."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_shard.kv_cache.block_tables import Load
from penstock_shard.kv_cache.doubt import is_proven, is_wrong
from penstock_shard.kv_cache.prefix_cache import PrefixCache, Save
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix
from penstock_shard.kv_transfer.arena import Arena, RecordName
from penstock_shard.kv_transfer.disk_tier import DiskTier
from penstock_shard.kv_transfer.import_checks import ImportChecks
from penstock_shard.worker.base import Runner


class HostTier:
    """The copies in an engine's arena. The prefix cache knows which prefixes have copies."""

    def __init__(
        self,
        arena: Arena,
        prefixes: PrefixCache,
        runner: Runner,
        disk: DiskTier | None = None,
    ) -> None:
        self._arena = arena
        self._disk = disk
        self._prefixes = prefixes
        self._runner = runner
        # None without peers.
        self.checks: ImportChecks | None = None
        # Blocks since the engine's start: copied out, copied back, found damaged.
        self.saved_total = 0
        self.loaded_total = 0
        self.damaged_total = 0

    def counts(self) -> dict[str, float]:
        return {
            "kv_saved_blocks_total": self.saved_total,
            "kv_loaded_blocks_total": self.loaded_total,
            "kv_damaged_blocks_total": self.damaged_total,
        }

    def restore(self) -> int:
        """Cache the copies that an earlier engine left, if all blocks before them have copies too.
        Returns their number.
        """
        known: dict[bytes, Prefix] = {}
        records = sorted(self._proven(), key=lambda record: record[1].index)
        found: list[Prefix] = []
        for slot, name in records:
            parent = known.get(name.parent)
            if name.index == 0:
                parent = self._prefixes.root(name.parent, is_salted=name.is_salted)
            if parent is None or parent.index != name.index - 1:
                continue
            prefix = self._prefixes.child(parent, name.digest, name.token_ids)
            if prefix.slots[name.group] == NO_BLOCK:
                self._prefixes.keep(prefix, name.group, slot)
            known[name.digest] = prefix
            found.append(prefix)
        self._prefixes.use(found)
        return len(found)

    def _proven(self) -> Iterator[tuple[int, RecordName]]:
        """Yield proven records. Clear all others, because after a restart it is not known which
        peers sent them.
        """
        for slot, name in self._arena.names():
            pool = self._arena.pool_of(name.group)
            if self._arena.is_proven(pool, slot):
                yield slot, name
            else:
                self._arena.clear(pool, slot)

    def load(self, load: Load) -> bool:
        """Copy a block back. Return False if its copy is gone or damaged. Drop a damaged copy."""
        prefix, group = load.prefix, load.group
        if prefix.slots[group] != load.slot:
            return False
        block = self._arena.read(load.slot, name_of(prefix, group))
        if block is None:
            self._prefixes.drop(prefix, group)
            self.damaged_total += 1
            return False
        self._runner.write_block(group, load.block_id, block)
        self.loaded_total += 1
        # The disk may have deleted this old block, but it is still used.
        self.write(prefix, group)
        return True

    def save(self, save: Save) -> None:
        """Copy a block that a collected step computed."""
        prefix, group, block_id = save.prefix, save.group, save.block_id
        pool = self._arena.pool_of(group)
        # A right block may have replaced this block, which was wrong.
        is_it = prefix.block_ids[group] in (NO_BLOCK, block_id) and not is_wrong(prefix.doubt)
        if is_it and prefix.slots[group] == NO_BLOCK and self._prefixes.has_free_slot(pool):
            slot = self._prefixes.take_slot(group)
            self._arena.write(
                slot,
                name_of(prefix, group),
                lambda into: self._runner.read_block(group, block_id, into),
            )
            self._prefixes.keep(prefix, group, slot)
            self.saved_total += 1
            if self.checks is not None:
                self.checks.note_copy(prefix, group)
                self.checks.compare(prefix, group, slot)
            self.write(prefix, group)
        self._prefixes.leave(prefix)

    def adopt(self, prefix: Prefix, group: int, record: bytes) -> None:
        """Put an intact record of this block into a slot. The prefix has a user."""
        is_free = self._prefixes.has_free_slot(self._arena.pool_of(group))
        if prefix.slots[group] == NO_BLOCK and is_free:
            slot = self._prefixes.take_slot(group)
            self._arena.put(slot, group, record)
            self._prefixes.keep(prefix, group, slot)
            prefix.doubt = None if is_wrong(prefix.doubt) else prefix.doubt

    def write(self, prefix: Prefix, group: int) -> None:
        """Have a copy written to disk, if there is a disk and the copy is known to be right."""
        slot = prefix.slots[group]
        if self._disk is not None and slot != NO_BLOCK and is_proven(prefix.doubt):
            self._disk.save(name_of(prefix, group), lambda: bytes(self._arena.record(slot, group)))


def name_of(prefix: Prefix, group: int) -> RecordName:
    assert prefix.parent is not None
    named = prefix.index, prefix.digest, prefix.parent.digest, prefix.token_ids
    return RecordName(group, *named, prefix.is_salted)
