"""Copies of KV blocks between steps: what sequences wait for, and what is to outlive the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock_shard.engine.final_saves import FinalSaves
from penstock_shard.engine.pending_fetches import PendingFetches
from penstock_shard.engine.pending_reads import PendingReads
from penstock_shard.ipc.block_messages import Distrust
from penstock_shard.ipc.messages import FromBlocks, Inbox
from penstock_shard.kv_cache.block_manager import BlockManager, Load
from penstock_shard.kv_transfer.exports import Exports
from penstock_shard.kv_transfer.host_tier import HostTier
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.sequence import Sequence

# So many bytes a turn, so that steps of others wait a few milliseconds at most.
_LOADED_BYTES = 32 * 2**20
_SAVED_BYTES = 8 * 2**20


class BlockMoves:
    """Moves what the block manager wants moved, while no step reads or writes it; and holds back
    sequences of which a disk or another shard has blocks, until these are in host memory.
    """

    def __init__(
        self, tier: HostTier, scheduler: Scheduler, blocks: BlockManager, block_bytes: int
    ) -> None:
        """`block_bytes` are of the largest block of any group."""
        self.tier = tier
        self._scheduler = scheduler
        self._blocks = blocks
        self.most_loads = max(1, _LOADED_BYTES // max(1, block_bytes))
        self._most_saves = max(1, _SAVED_BYTES // max(1, block_bytes))
        # Of a disk; of other shards, and for them. None where there is no such.
        self.reads: PendingReads | None = None
        self.fetches: PendingFetches | None = None
        self.exports: Exports | None = None
        self.send: Callable[[FromBlocks], None] = lambda message: None
        # Sequences that wait no more.
        self._ready: list[Sequence] = []
        # Once the shard ends.
        self._final: FinalSaves | None = None

    @property
    def has_work(self) -> bool:
        """Whether blocks wait to be copied out, or sequences to be queued. Those that are to be
        copied back are waited for by sequences.
        """
        asked = self.exports is not None and self.exports.num_waiting > 0
        return asked or bool(self._ready) or self._blocks.prefixes.has_wishes

    # ---- sequences that wait ----

    @property
    def num_held_back(self) -> int:
        """Sequences that are not queued yet."""
        fetching = 0 if self.fetches is None else len(self.fetches)
        reading = 0 if self.reads is None else len(self.reads)
        return fetching + reading + len(self._ready)

    @property
    def due_s(self) -> float | None:
        """In how many seconds a sequence has waited enough; None if there is none."""
        return None if self.reads is None else self.reads.due_s

    def hold(self, sequence: Sequence) -> bool:
        """Whether a sequence has to wait before it is queued: `take_ready` gives it then."""
        fetches = self.fetches is not None and self.fetches.hold(sequence)
        return fetches or self._reads(sequence)

    def _reads(self, sequence: Sequence) -> bool:
        return self.reads is not None and self.reads.add(sequence)

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended; whether it waited."""
        if sequence in self._ready:
            self._ready.remove(sequence)
            self._blocks.forget(sequence)
            return True
        if self.fetches is not None and self.fetches.discard(sequence):
            return True
        return self.reads is not None and self.reads.discard(sequence)

    def take_ready(self) -> list[Sequence]:
        """Sequences that wait no more."""
        ready, self._ready = self._ready, []
        return ready if self.reads is None else [*ready, *self.reads.take()]

    def take(self, message: Inbox) -> None:
        """What the server says of blocks of other shards."""
        if self.exports is None or self.fetches is None:
            return
        for export in message.exports:
            self.exports.begin(export)
        for number in message.exports_over:
            self.exports.end(number)
        for arrival in message.arrivals:
            sequence = self.fetches.arrive(arrival)
            if sequence is not None and not self._reads(sequence):
                self._ready.append(sequence)

    def distrust(self, source: str) -> None:
        """A peer's block is not what is computed here: who has others of it is computed again."""
        if self.fetches is not None:
            self.fetches.fetches.refused_total += 1
        self.send(Distrust(source))
        self._scheduler.preempt_those(
            lambda sequence: sequence.request.kv_source == source, "a peer's KV blocks are wrong"
        )

    # ---- copies ----

    def load(self) -> None:
        """Go on with what sequences wait for. One whose copies are not there any more is queued
        again.
        """
        for sequence, load in self._due_loads():
            if not self.tier.load(load):
                self._scheduler.lose_loads(sequence)
                return
            load.is_done = True
        for sequence in self._scheduler.loading:
            if all(load.is_done for load in self._blocks.loads_of(sequence)):
                self._scheduler.finish_loads(sequence)

    def _due_loads(self) -> Iterator[tuple[Sequence, Load]]:
        left = self.most_loads
        for sequence in self._scheduler.loading:
            for load in self._blocks.loads_of(sequence):
                if not load.is_done and left:
                    left -= 1
                    yield sequence, load

    def save(self) -> None:
        """Copy out what is due. Comes after a step is planned, and before it is launched."""
        prefixes = self._blocks.prefixes
        if prefixes.has_wishes:
            computed = self._scheduler.num_computed_insertions
            for save in prefixes.take_saves(self._most_saves, computed):
                self.tier.save(save)
        if self.exports is not None:
            self.exports.advance()

    def save_all(self) -> None:
        """Nothing runs, nor will: have all that is cached written to disk, if there is one."""
        if self._final is None and self.reads is not None:
            self._final = FinalSaves(self.tier, self._blocks.prefixes, self.reads.disk)
        if self._final is not None:
            self._final.advance(self._most_saves)

    @property
    def has_unsaved(self) -> bool:
        """Whether `save_all` has something to do now."""
        return self.reads is not None and (self._final is None or self._final.has_work)

    @property
    def is_saved(self) -> bool:
        """Whether `save_all` has nothing to do any more."""
        return self._final is not None and self._final.is_over

    def counts(self) -> dict[str, int]:
        """Fields of `Load`."""
        tier, counts = self.tier, dict[str, int]()
        counts["saved_blocks_total"] = tier.saved_total
        counts["loaded_blocks_total"] = tier.loaded_total
        counts["damaged_blocks_total"] = tier.damaged_total
        if self.reads is not None:
            disk = self.reads.disk
            counts["disk_blocks"] = disk.num_blocks
            counts["disk_saved_blocks_total"] = disk.saved_total
            counts["disk_loaded_blocks_total"] = disk.loaded_total
            counts["disk_damaged_blocks_total"] = disk.damaged_total
            counts["disk_dropped_blocks_total"] = disk.dropped_total
        if self.exports is not None and self.fetches is not None:
            counts["exported_blocks_total"] = self.exports.exported_total
            counts["fetched_blocks_total"] = self.fetches.fetches.fetched_total
            counts["refused_blocks_total"] = self.fetches.fetches.refused_total
        return counts
