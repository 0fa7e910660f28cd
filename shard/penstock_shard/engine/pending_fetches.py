"""Sequences that wait for other shards' KV blocks before they are queued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock_proto.types import PrefixNames
from penstock_shard.ipc.block_messages import Arrival, Fetch, FetchOver
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_transfer.fetches import Fetches, FetchProgress
from penstock_shard.sequence import Sequence

# Computing fewer blocks than this takes no longer than fetching them.
_LEAST_BLOCKS = 4
# Blocks that can be computed in fewer seconds are not fetched, because a fetch takes some steps of
# both shards.
_LEAST_S = 0.025
# The longest wait in seconds, even if computing takes longer.
_LONGEST_S = 10.0
# The shortest deadline; and the deadline before any step was timed, so that a new shard fetches the
# fleet's blocks.
_SHORTEST_S = 0.25
_UNTIMED_S = 2.0
# The deadline if no client waits, because the sequence still runs at the source.
_PREFETCH_S = 30.0


@dataclass(slots=True, eq=False)
class _Pending:
    """A fetch, and an ordered set of sequences that wait for it."""

    number: int
    progress: FetchProgress
    # Hashes of the blocks that may come.
    digests: list[bytes]
    sequences: dict[Sequence, None] = field(default_factory=dict)


class PendingFetches:
    """Sequences that wait for fetches, at most about as long as computing the blocks would take.
    Sequences that lack the same blocks wait for the same fetch.
    """

    def __init__(
        self,
        fetches: Fetches,
        blocks: BlockManager,
        compute_s: Callable[[int, int], float],
        send: Callable[[Fetch | FetchOver], None],
    ) -> None:
        """`compute_s(start, n)` predicts the seconds to compute `n` prompt tokens from position
        `start`; 0 if it cannot.
        """
        self.fetches = fetches
        self._blocks = blocks
        self._compute_s = compute_s
        self._send = send
        self._of: dict[Sequence, _Pending] = {}
        self._pending: dict[int, _Pending] = {}
        # Fetches by the hash of each block that may come.
        self._coming: dict[bytes, _Pending] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._of)

    def hold(self, sequence: Sequence) -> bool:
        """Hold a sequence if another shard may have its blocks; false if it need not wait."""
        source = sequence.request.kv_source
        if not (source or self._pending) or sequence.needs_whole_prompt:
            return False
        names, num_known = self._blocks.missing_of(sequence)
        # More blocks would push out the first blocks of the same prefix.
        names = names.first(num_known + self.fetches.most_blocks)
        missing = names.digests[num_known:]
        wait_s = self._most_wait_s(sequence, num_known, len(missing))
        if len(missing) < _LEAST_BLOCKS or not wait_s:
            return False
        pending = self._coming.get(missing[0])
        if pending is None and source:
            pending = self._begin(sequence, names, num_known, wait_s)
        if pending is None:
            return False
        pending.sequences[sequence] = None
        self._of[sequence] = pending
        return True

    def _begin(
        self, sequence: Sequence, names: PrefixNames, num_known: int, wait_s: float
    ) -> _Pending:
        self._number += 1
        request = sequence.request
        is_salted = bool(request.cache_salt)
        progress = self.fetches.begin(request.kv_source, names, num_known, is_salted=is_salted)
        pending = _Pending(self._number, progress, names.digests[num_known:])
        self._pending[self._number] = pending
        self._coming |= dict.fromkeys(pending.digests, pending)
        self._send(Fetch(self._number, request.kv_source, names, num_known, wait_s))
        return pending

    def _most_wait_s(self, sequence: Sequence, num_known: int, num_missing: int) -> float:
        """The seconds to wait for the missing blocks; 0 if computing them is faster than a
        fetch.
        """
        if sequence.request.only_fetches:
            return _PREFETCH_S
        size = self._blocks.block_size
        compute_s = self._compute_s(num_known * size, num_missing * size)
        if 0 < compute_s < _LEAST_S:
            return 0.0
        return min(max(compute_s or _UNTIMED_S, _SHORTEST_S), _LONGEST_S)

    def arrive(self, arrival: Arrival) -> list[Sequence]:
        """Take blocks that arrived. Returns sequences to be queued, because their fetch is over."""
        self.fetches.refused_total += arrival.is_damaged
        pending = self._pending.get(arrival.number)
        self.fetches.take(None if pending is None else pending.progress, arrival.slots)
        if pending is None or not arrival.is_last:
            return []
        self._end(pending)
        for sequence in pending.sequences:
            del self._of[sequence]
        return list(pending.sequences)

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended; true if it was waiting."""
        pending = self._of.pop(sequence, None)
        if pending is None:
            return False
        self._blocks.forget(sequence)
        del pending.sequences[sequence]
        if not pending.sequences:
            self._end(pending)
            self._send(FetchOver(pending.number))
        return True

    def _end(self, pending: _Pending) -> None:
        del self._pending[pending.number]
        for digest in pending.digests:
            if self._coming.get(digest) is pending:
                del self._coming[digest]
        self.fetches.end(pending.progress)
