"""The runner's slots, and the sequences that hold them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock_shard.sequence import Sequence


class SlotPool:
    """Gives out slots. A sequence keeps its slot until its last step is collected, so at most (1 +
    steps ahead) times the largest number of running sequences is in use.
    """

    def __init__(self) -> None:
        self._holders: dict[int, Sequence] = {}
        self._free: list[int] = []
        # Returned by the next `take_freed`.
        self._freed: list[int] = []

    @property
    def holders(self) -> Collection[Sequence]:
        return self._holders.values()

    def __getitem__(self, slot: int) -> Sequence:
        return self._holders[slot]

    def holders_of(self, slots: Iterable[int]) -> Iterable[Sequence]:
        return map(self._holders.__getitem__, slots)

    def give(self, sequence: Sequence) -> None:
        sequence.slot = self._free.pop() if self._free else len(self._holders)
        self._holders[sequence.slot] = sequence

    def free(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            del self._holders[sequence.slot]
            self._free.append(sequence.slot)
            self._freed.append(sequence.slot)
            sequence.slot = -1

    def take_freed(self) -> list[int]:
        freed, self._freed = self._freed, []
        return freed
