"""Tracks which prefix pieces the engine holds, for callers that watch them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field

from penstock_proto.prefix_hash import Tier

_MOST_PIECES = 2**20
# Pieces are kept in this many parts. Copying a part takes 0.1 ms.
_NUM_PARTS = 256
# At most this many pieces are in one report, which takes less than a millisecond to write or read.
_MOST_IN_REPORT = 1024
# A caller with more unread changes gets a new snapshot.
_MOST_CHANGED = 65_536
_MIN_REPORT_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class PiecesReport:
    """Names of pieces, each with its `Tier`. `begins` and `ends` mark a snapshot's first and last
    report.
    """

    instance_id: str
    pieces: list[tuple[int, int]]
    begins: bool = False
    ends: bool = False


@dataclass(eq=False, slots=True)
class _Watch:
    """News for a caller: a whole snapshot if `is_behind`, else the changed names."""

    is_behind: bool = True
    changed: dict[int, None] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, names: list[int]) -> None:
        self.changed.update(dict.fromkeys(names))
        if len(self.changed) > _MOST_CHANGED:
            self.restart()
        self.news.set()

    def restart(self) -> None:
        self.changed.clear()
        self.is_behind = True
        self.news.set()

    def take(self) -> list[int]:
        count = min(len(self.changed), _MOST_IN_REPORT)
        return [self.changed.popitem()[0] for _ in range(count)]


class HeldPieces:
    def __init__(self) -> None:
        self._instance_id = ""
        self._parts: list[dict[int, int]] = [{} for _ in range(_NUM_PARTS)]
        self._watches: set[_Watch] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def begin(self, instance_id: str) -> None:
        """Begin with a new engine and forget the old one's pieces."""
        self._instance_id, self._count = instance_id, 0
        self._parts = [{} for _ in range(_NUM_PARTS)]
        for watch in self._watches:
            watch.restart()

    def take(self, changes: Mapping[int, int]) -> None:
        """Take over changes: `changes` maps a piece's name to its `Tier`."""
        names = [name for name, tier in changes.items() if self._set(name, tier)]
        if names:
            for watch in self._watches:
                watch.note(names)

    def _set(self, name: int, tier: int) -> bool:
        """Set a piece's tier; return true if it changed."""
        part = self._parts[name % _NUM_PARTS]
        before = part.get(name, Tier.GONE)
        if before == tier or (before == Tier.GONE and self._count >= _MOST_PIECES):
            return False
        if tier == Tier.GONE:
            del part[name]
        else:
            part[name] = tier
        self._count += (before == Tier.GONE) - (tier == Tier.GONE)
        return True

    async def watch(self) -> AsyncGenerator[PiecesReport, None]:
        """Yield all pieces, then changes, at most ten times a second, in bounded reports."""
        watch = _Watch()
        self._watches.add(watch)
        try:
            while True:
                # Clear first, so that changes that arrive while reports are read are sent too.
                watch.news.clear()
                if watch.is_behind:
                    watch.is_behind = False
                    for report in self._snapshot(watch):
                        yield report
                while not watch.is_behind and (names := watch.take()):
                    yield PiecesReport(self._instance_id, [self._now(name) for name in names])
                await asyncio.sleep(_MIN_REPORT_INTERVAL_S)
                await watch.news.wait()
        finally:
            self._watches.discard(watch)

    def _now(self, name: int) -> tuple[int, int]:
        return name, self._parts[name % _NUM_PARTS].get(name, Tier.GONE)

    def _snapshot(self, watch: _Watch) -> Iterator[PiecesReport]:
        """Yield reports of all pieces; end early if a new snapshot is needed. Changes during a
        snapshot are sent after it.
        """
        instance_id, pieces, begins = self._instance_id, list[tuple[int, int]](), True
        for number in range(_NUM_PARTS):
            pieces += self._parts[number].items()
            while len(pieces) > _MOST_IN_REPORT:
                if watch.is_behind:
                    return
                yield PiecesReport(instance_id, pieces[:_MOST_IN_REPORT], begins)
                begins = False
                del pieces[:_MOST_IN_REPORT]
        if not watch.is_behind:
            yield PiecesReport(instance_id, pieces, begins, ends=True)
