"""Sequences that wait for KV blocks of other shards before they are queued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock_shard.ipc.block_messages import Arrival, Fetch, FetchOver, PrefixNames
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
# How long it waits at least; and how long while no step was timed, when nothing is known of
# computing: a shard that joins fetches what the fleet has, if its device is not a fast one.
_SHORTEST_S = 0.25
_UNTIMED_S = 2.0
# How long where nobody waits: the source goes on with it meanwhile.
_PREFETCH_S = 30.0


@dataclass(slots=True, eq=False)
class _Pending:
    """A fetch, and the sequences that wait for what comes of it. Values are unused."""

    number: int
    progress: FetchProgress
    # Hashes of the blocks that it may bring.
    digests: list[bytes]
    sequences: dict[Sequence, None] = field(default_factory=dict)


class PendingFetches:
    """A fetch takes as long as computing what it fetches would take, or less. Whoever lacks the
    same blocks waits for it too.
    """

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
        self._of: dict[Sequence, _Pending] = {}
        self._pending: dict[int, _Pending] = {}
        # By the hash of each block that may come.
        self._coming: dict[bytes, _Pending] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._of)

    def hold(self, sequence: Sequence) -> bool:
        """Whether a sequence waits, since another shard may have blocks of it."""
        source = sequence.request.kv_source
        if not (source or self._pending) or sequence.needs_whole_prompt:
            return False
        names, num_known = self._blocks.missing_of(sequence)
        # More would take the place of its own beginnings.
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
        """How long the blocks behind those that are known are worth waiting for; 0 if they are
        computed before any fetch is over.
        """
        if sequence.request.only_fetches:
            return _PREFETCH_S
        size = self._blocks.block_size
        compute_s = self._compute_s(num_known * size, num_missing * size)
        if 0 < compute_s < _LEAST_S:
            return 0.0
        return min(max(compute_s or _UNTIMED_S, _SHORTEST_S), _LONGEST_S)

    def arrive(self, arrival: Arrival) -> list[Sequence]:
        """Take what came; the sequences that have all there is, and may be queued."""
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
        """Forget a sequence that ended; whether it waited."""
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
