"""Reads blocks from disk for sequences before they are queued, if this is faster than computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock_common.clock import Clock
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_cache.prefix_tree import Prefix
from penstock_shard.kv_transfer.disk_tier import DiskTier, Read
from penstock_shard.kv_transfer.host_tier import HostTier, name_of
from penstock_shard.kv_transfer.read_plan import Chain, plan_reads
from penstock_shard.sequence import Sequence

# The longest wait of a sequence.
_MOST_WAIT_S = 2.0

_Block = tuple[Prefix, int]


@dataclass(eq=False, slots=True)
class _Waiting:
    """The blocks that a sequence waits for, and its deadline. `last`: the longest prefix of
    them.
    """

    last: Prefix
    until_s: float
    blocks: set[_Block]


@dataclass(eq=False, slots=True)
class _Reading:
    """The read of a block, and the sequences that wait for it."""

    read: Read
    sequences: set[Sequence] = field(default_factory=set)


class PendingReads:
    """Sequences that wait for blocks from disk. A block for several sequences is read once."""

    def __init__(
        self,
        disk: DiskTier,
        tier: HostTier,
        blocks: BlockManager,
        compute_s: Callable[[int, int], float],
        *,
        most_blocks: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """Take at most `most_blocks` a turn. `compute_s` is as in `PendingFetches`."""
        self.disk = disk
        self._tier = tier
        self._blocks = blocks
        self._compute_s = compute_s
        self._most_blocks = most_blocks
        self._clock = clock
        self._waiting: dict[Sequence, _Waiting] = {}
        self._reading: dict[_Block, _Reading] = {}
        self._block_of: dict[Read, _Block] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def due_s(self) -> float | None:
        """Seconds until the next deadline; None if no sequence waits."""
        ends = [waiting.until_s for waiting in self._waiting.values()]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def add(self, sequence: Sequence) -> bool:
        """Begin to read a sequence's prefix from disk; false if it need not wait."""
        if self.disk.hangs or not self.disk.num_blocks or sequence.needs_whole_prompt:
            return False
        root, is_salted = self._blocks.root_of(sequence), bool(sequence.request.cache_salt)
        chain = Chain(root, is_salted, self._blocks.names_of(sequence))
        plan = plan_reads(self._blocks.prefixes, chain, self.disk.has)
        if plan is None:
            return False
        size = self._blocks.block_size
        num_tokens = (plan.num_blocks - plan.num_found) * size
        wait_s = self._compute_s(plan.num_found * size, num_tokens) or _MOST_WAIT_S
        until_s = self._clock() + min(wait_s, _MOST_WAIT_S)
        self._waiting[sequence] = _Waiting(plan.last, until_s, set(plan.blocks))
        for block in plan.blocks:
            self._read(block).sequences.add(sequence)
        return True

    def _read(self, block: _Block) -> _Reading:
        reading = self._reading.get(block)
        if reading is None:
            reading = self._reading[block] = _Reading(Read(name_of(*block)))
            self._block_of[reading.read] = block
            self.disk.read(reading.read)
        return reading

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended; true if it was waiting."""
        if sequence not in self._waiting:
            return False
        self._leave(sequence)
        self._blocks.forget(sequence)
        return True

    def take(self) -> list[Sequence]:
        """Put blocks that were read into host memory. Returns the sequences that have all blocks or
        reached their deadline; missing blocks are computed.
        """
        for read in self.disk.take(self._most_blocks):
            self._take(read)
        now_s = self._clock()
        ready = [
            sequence
            for sequence, waiting in self._waiting.items()
            if not waiting.blocks or waiting.until_s <= now_s
        ]
        for sequence in ready:
            self._leave(sequence)
        return ready

    def _take(self, read: Read) -> None:
        block = self._block_of.get(read)
        if block is None:
            return
        if read.record is not None:
            self._tier.adopt(*block, read.record)
        for sequence in self._drop(block).sequences:
            self._waiting[sequence].blocks.discard(block)

    def _drop(self, block: _Block) -> _Reading:
        reading = self._reading.pop(block)
        del self._block_of[reading.read]
        return reading

    def _leave(self, sequence: Sequence) -> None:
        """End a sequence's wait, and the reads that no other sequence waits for."""
        waiting = self._waiting.pop(sequence)
        for block in waiting.blocks:
            reading = self._reading[block]
            reading.sequences.discard(sequence)
            if not reading.sequences:
                self._drop(block).read.is_discarded = True
        self._blocks.prefixes.leave(waiting.last)
