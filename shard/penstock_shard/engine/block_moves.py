"""Copies KV blocks between steps: blocks that sequences wait for, and blocks to save."""

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

# A turn may copy for this part of a step's time if a sequence or peer waits for the blocks; below,
# if not.
_WAITED_FOR = 0.5
_AHEAD = 1 / 16
# Seconds for a turn's copies if no sequence runs.
_IDLE_S = 0.02


class BlockMoves:
    """Copies blocks while no step reads or writes them. Holds sequences until their blocks on disk
    or at other shards are in host memory.
    """

    def __init__(
        self, tier: HostTier, scheduler: Scheduler, blocks: BlockManager, clock: Clock
    ) -> None:
        self.tier = tier
        self._scheduler = scheduler
        self._blocks = blocks
        self._clock = clock
        # Seconds of the last step.
        self.step_s = 0.0
        self._load_pace = CopyPace()
        self._save_pace = CopyPace()
        # Reads from disk; below, fetches from other shards and exports. None if unused.
        self.reads: PendingReads | None = None
        self.fetches: PendingFetches | None = None
        self.exports: Exports | None = None
        self.send: Callable[[FromBlocks], None] = lambda message: None
        # Sequences that need not wait any more; below, those that only load blocks, and now have
        # all blocks.
        self._ready: list[Sequence] = []
        self._fetched: list[Sequence] = []
        # Set when the shard begins to end.
        self._final: FinalSaves | None = None

    @property
    def has_work(self) -> bool:
        """True if blocks wait to be saved or exported, or sequences to be queued."""
        asked = self.exports is not None and self.exports.num_waiting > 0
        return asked or bool(self._ready) or self._blocks.prefixes.has_wishes

    # ---- sequences that wait ----

    @property
    def num_held_back(self) -> int:
        fetching = 0 if self.fetches is None else len(self.fetches)
        reading = 0 if self.reads is None else len(self.reads)
        return fetching + reading + len(self._ready)

    @property
    def due_s(self) -> float | None:
        """Seconds until the next deadline of a sequence; None if none waits."""
        return None if self.reads is None else self.reads.due_s

    def hold(self, sequence: Sequence) -> bool:
        """Hold a sequence until `take_ready` if it must wait for blocks; false if it need not."""
        fetches = self.fetches is not None and self.fetches.hold(sequence)
        return fetches or self._reads(sequence)

    def _reads(self, sequence: Sequence) -> bool:
        return self.reads is not None and self.reads.add(sequence)

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended; true if it was waiting."""
        if sequence in self._ready:
            self._ready.remove(sequence)
            self._blocks.forget(sequence)
            return True
        if self.fetches is not None and self.fetches.discard(sequence):
            return True
        return self.reads is not None and self.reads.discard(sequence)

    def take_ready(self) -> list[Sequence]:
        ready, self._ready = self._ready, []
        return ready if self.reads is None else [*ready, *self.reads.take()]

    def take_fetched(self) -> list[Sequence]:
        fetched, self._fetched = self._fetched, []
        return fetched

    def take(self, message: Inbox) -> None:
        """Handle messages about other shards' blocks."""
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
        """Preempt all sequences that use a peer's wrong blocks."""
        if self.fetches is not None:
            self.fetches.fetches.refused_total += 1
        self.send(Distrust(source))
        self._scheduler.preempt_those(self._blocks.is_wrong, "a peer's KV blocks are wrong")

    # ---- copies ----

    def load(self) -> None:
        """Load blocks that sequences wait for, then blocks needed later. Queue sequences again if
        their copies are gone.
        """
        loading = self._scheduler.loading
        ends_s: list[float] = []
        for sequence in sorted(loading, key=lambda each: each.request.only_fetches):
            self._load(sequence, ends_s)
        self._load_pace.learn(ends_s)

    def _load(self, sequence: Sequence, ends_s: list[float]) -> None:
        """Load as many blocks as this turn has time for; append the end of each copy to
        `ends_s`.
        """
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
        is_idle = not self._scheduler.num_running
        return pace.blocks_in(_IDLE_S if is_idle else share * self.step_s)

    def save(self) -> None:
        """Save blocks that are due. Call this between a step's planning and its launch."""
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
        """Write all cached blocks to disk, once no sequence will run any more."""
        if self._final is None and self.reads is not None:
            self._final = FinalSaves(self.tier, self._blocks.prefixes, self.reads.disk)
        if self._final is not None:
            self._final.advance(self._most(self._save_pace, _WAITED_FOR))

    @property
    def has_unsaved(self) -> bool:
        """True if `save_all` has work."""
        return self.reads is not None and (self._final is None or self._final.has_work)

    @property
    def is_saved(self) -> bool:
        return self._final is not None and self._final.is_over

    def counts(self) -> dict[str, float]:
        counts = self.tier.counts()
        if self.reads is not None:
            counts |= self.reads.disk.counts()
        if self.exports is not None and self.fetches is not None:
            counts |= self.exports.counts() | self.fetches.fetches.counts()
        return counts
