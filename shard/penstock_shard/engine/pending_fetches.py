"""Sequences that wait for KV blocks of other shards before they are queued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock_shard.ipc.block_messages import Arrival, Fetch, FetchOver
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_transfer.fetches import Fetches, FetchProgress
from penstock_shard.sequence import Sequence

# Fewer blocks than this are computed as soon as they are fetched.
_LEAST_BLOCKS = 4
# And so is what takes no longer than this: before anything that is fetched is where it is needed,
# some steps of both shards pass.
_LEAST_S = 0.025
# How long it waits at most, whatever computing would take.
_LONGEST_S = 10.0
# How long it waits at least: while no step was timed, nothing is known of computing.
_SHORTEST_S = 0.25
# How long where nobody waits: the source goes on with it meanwhile.
_PREFETCH_S = 30.0


@dataclass(slots=True)
class _Waiting:
    number: int
    progress: FetchProgress


class PendingFetches:
    """A fetch takes as long as computing what it fetches would take, or less."""

    def __init__(
        self,
        fetches: Fetches,
        blocks: BlockManager,
        compute_s: Callable[[int, int], float],
        send: Callable[[Fetch | FetchOver], None],
    ) -> None:
        """`compute_s` predicts the seconds for so many tokens of a prompt from a position on; 0
        where it cannot.
        """
        self.fetches = fetches
        self._blocks = blocks
        self._compute_s = compute_s
        self._send = send
        self._waiting: dict[Sequence, _Waiting] = {}
        self._sequences: dict[int, Sequence] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, sequence: Sequence) -> bool:
        """Whether a sequence waits, since another shard may have blocks of it."""
        source = sequence.request.kv_source
        if not source or sequence.needs_whole_prompt:
            return False
        names, num_known = self._blocks.missing_of(sequence)
        # More would take the place of its own beginnings.
        names = names.first(num_known + self.fetches.most_blocks)
        num_missing = len(names.digests) - num_known
        wait_s = self._most_wait_s(sequence, num_known, num_missing)
        if num_missing < _LEAST_BLOCKS or not wait_s:
            return False
        self._number += 1
        is_salted = bool(sequence.request.cache_salt)
        progress = self.fetches.begin(source, names, num_known, is_salted=is_salted)
        self._waiting[sequence] = _Waiting(self._number, progress)
        self._sequences[self._number] = sequence
        self._send(Fetch(self._number, source, names, num_known, wait_s))
        return True

    def _most_wait_s(self, sequence: Sequence, num_known: int, num_missing: int) -> float:
        """How long the blocks behind those that are known are worth waiting for; 0 if they are
        computed before any fetch is over.
        """
        if sequence.request.only_fetches:
            return _PREFETCH_S
        size = self._blocks.block_size
        compute_s = self._compute_s(num_known * size, num_missing * size)
        if 0 < compute_s < _LEAST_S:
            return 0.0
        return min(max(compute_s, _SHORTEST_S), _LONGEST_S)

    def arrive(self, arrival: Arrival) -> Sequence | None:
        """Take what came; the sequence that has all there is, and may be queued."""
        self.fetches.refused_total += arrival.is_damaged
        sequence = self._sequences.get(arrival.number)
        waiting = None if sequence is None else self._waiting[sequence]
        self.fetches.take(None if waiting is None else waiting.progress, arrival.slots)
        if sequence is None or not arrival.is_last:
            return None
        self._end(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended; whether it waited."""
        waiting = self._waiting.get(sequence)
        if waiting is None:
            return False
        self._end(sequence)
        self._blocks.forget(sequence)
        self._send(FetchOver(waiting.number))
        return True

    def _end(self, sequence: Sequence) -> None:
        waiting = self._waiting.pop(sequence)
        del self._sequences[waiting.number]
        self.fetches.end(waiting.progress)
