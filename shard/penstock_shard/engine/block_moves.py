"""Copies of KV blocks between steps: what sequences wait for, and what is to outlive the device."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_shard.kv_cache.block_manager import BlockManager, Load
from penstock_shard.kv_transfer.host_tier import HostTier
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.sequence import Sequence

# So many bytes a turn, so that steps of others wait a few milliseconds at most.
_LOADED_BYTES = 32 * 2**20
_SAVED_BYTES = 8 * 2**20


class BlockMoves:
    """Moves what the block manager wants moved, while no step reads or writes it."""

    def __init__(
        self, tier: HostTier, scheduler: Scheduler, blocks: BlockManager, block_bytes: int
    ) -> None:
        """`block_bytes` are of the largest block of any group."""
        self.tier = tier
        self._scheduler = scheduler
        self._blocks = blocks
        self.most_loads = max(1, _LOADED_BYTES // max(1, block_bytes))
        self._most_saves = max(1, _SAVED_BYTES // max(1, block_bytes))

    @property
    def has_work(self) -> bool:
        """Whether blocks wait to be copied out. Those that are to be copied back are waited for by
        sequences.
        """
        return self._blocks.prefixes.has_wishes

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
