"""Who has which slot of the runner."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock_shard.sequence import Sequence


class SlotPool:
    """Gives out the lowest slots that nobody has. There are never more than sequences may run, and
    in each step ahead may have run, as a sequence leaves its slot when its last step is collected.
    """

    def __init__(self) -> None:
        self._holders: dict[int, Sequence] = {}
        self._free: list[int] = []
        # What `take_freed` returns next.
        self._freed: list[int] = []

    @property
    def holders(self) -> Collection[Sequence]:
        return self._holders.values()

    def __getitem__(self, slot: int) -> Sequence:
        """Who has this slot."""
        return self._holders[slot]

    def holders_of(self, slots: Iterable[int]) -> Iterable[Sequence]:
        """Who has each of these."""
        return map(self._holders.__getitem__, slots)

    def give(self, sequence: Sequence) -> None:
        """Give it a slot."""
        sequence.slot = self._free.pop() if self._free else len(self._holders)
        self._holders[sequence.slot] = sequence

    def free(self, sequence: Sequence) -> None:
        """Take its slot back, if it has one."""
        if sequence.slot >= 0:
            del self._holders[sequence.slot]
            self._free.append(sequence.slot)
            self._freed.append(sequence.slot)
            sequence.slot = -1

    def take_freed(self) -> list[int]:
        """Slots that were freed since the last call."""
        freed, self._freed = self._freed, []
        return freed
