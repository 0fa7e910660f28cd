"""Copies of KV blocks between steps: what sequences wait for, and what is to outlive the device."""

from __future__ import annotations

from collections.abc import Callable

from penstock_common.clock import Clock
from penstock_shard.engine.copy_pace import CopyPace
from penstock_shard.engine.final_saves import FinalSaves
from penstock_shard.engine.pending_fetches import PendingFetches
from penstock_shard.engine.pending_reads import PendingReads
from penstock_shard.ipc.block_messages import Distrust
from penstock_shard.ipc.messages import FromBlocks, Inbox
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_transfer.exports import Exports
from penstock_shard.kv_transfer.host_tier import HostTier
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.sequence import Sequence

# What copies of a turn may take of the time of a step: those that a sequence or a peer waits for,
# and those for which nobody does.
_WAITED_FOR = 0.5
_AHEAD = 1 / 16
# How long copies of a turn take where no sequence runs.
_IDLE_S = 0.02


class BlockMoves:
    """Moves what the block manager wants moved, while no step reads or writes it; and holds back
    sequences of which a disk or another shard has blocks, until these are in host memory.
    """

    def __init__(
        self, tier: HostTier, scheduler: Scheduler, blocks: BlockManager, clock: Clock
    ) -> None:
        self.tier = tier
        self._scheduler = scheduler
        self._blocks = blocks
        self._clock = clock
        # What the last step took.
        self.step_s = 0.0
        self._load_pace = CopyPace()
        self._save_pace = CopyPace()
        # Of a disk; of other shards, and for them. None where there is no such.
        self.reads: PendingReads | None = None
        self.fetches: PendingFetches | None = None
        self.exports: Exports | None = None
        self.send: Callable[[FromBlocks], None] = lambda message: None
        # Sequences that wait no more; and of those that will not run, those that are loaded.
        self._ready: list[Sequence] = []
        self._fetched: list[Sequence] = []
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

    def take_fetched(self) -> list[Sequence]:
        """Sequences that will not run, and of which all is done."""
        fetched, self._fetched = self._fetched, []
        return fetched

    def take(self, message: Inbox) -> None:
        """What the server says of blocks of other shards."""
        if self.exports is None or self.fetches is None:
            return
        for export in message.exports:
            self.exports.begin(export)
        for number in message.exports_over:
            self.exports.end(number)
        for arrival in message.arrivals:
            came = self.fetches.arrive(arrival)
            self._ready += [sequence for sequence in came if not self._reads(sequence)]

    def distrust(self, source: str) -> None:
        """A peer's blocks are wrong: who has some, or what relies on them, is computed again."""
        if self.fetches is not None:
            self.fetches.fetches.refused_total += 1
        self.send(Distrust(source))
        self._scheduler.preempt_those(self._blocks.is_wrong, "a peer's KV blocks are wrong")

    # ---- copies ----

    def load(self) -> None:
        """Go on with what sequences wait for, or with what will be needed. One whose copies are not
        there any more is queued again.
        """
        loading = self._scheduler.loading
        ends_s: list[float] = []
        for sequence in sorted(loading, key=lambda each: each.request.only_fetches):
            self._load(sequence, ends_s)
        self._load_pace.learn(ends_s)

    def _load(self, sequence: Sequence, ends_s: list[float]) -> None:
        """Load what the turn has time for; `ends_s` has when each copy of the turn was over."""
        is_ahead = sequence.request.only_fetches
        if is_ahead and self._blocks.is_wrong(sequence):
            self._lose_loads(sequence)
            return
        most = self._most(self._load_pace, _AHEAD if is_ahead else _WAITED_FOR)
        due = (load for load in self._blocks.loads_of(sequence) if not load.is_done)
        for load in due:
            if len(ends_s) >= most:
                return
            if not self.tier.load(load):
                self._lose_loads(sequence)
                return
            load.is_done = True
            ends_s.append(self._clock())
        if is_ahead:
            self._blocks.finish_loads(sequence)
            self._fetched.append(sequence)
        else:
            self._scheduler.finish_loads(sequence)

    def _lose_loads(self, sequence: Sequence) -> None:
        if sequence.request.only_fetches:
            self._fetched.append(sequence)
        else:
            self._scheduler.lose_loads(sequence)

    def _most(self, pace: CopyPace, share: float) -> int:
        """How many blocks a turn may copy."""
        is_idle = not self._scheduler.num_running
        return pace.blocks_in(_IDLE_S if is_idle else share * self.step_s)

    def save(self) -> None:
        """Copy out what is due. Comes after a step is planned, and before it is launched."""
        prefixes, exports = self._blocks.prefixes, self.exports
        if prefixes.has_wishes:
            is_waited_for = exports is not None and exports.num_waiting > 0
            most = self._most(self._save_pace, _WAITED_FOR if is_waited_for else _AHEAD)
            computed = self._scheduler.num_computed_insertions
            ends_s: list[float] = []
            for save in prefixes.take_saves(most, computed):
                self.tier.save(save)
                ends_s.append(self._clock())
            self._save_pace.learn(ends_s)
        if exports is not None:
            exports.advance()

    def save_all(self) -> None:
        """Nothing runs, nor will: have all that is cached written to disk, if there is one."""
        if self._final is None and self.reads is not None:
            self._final = FinalSaves(self.tier, self._blocks.prefixes, self.reads.disk)
        if self._final is not None:
            self._final.advance(self._most(self._save_pace, _WAITED_FOR))

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
