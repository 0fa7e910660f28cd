"""Copies of KV blocks on a disk, below those in host memory: read and written by a thread, so that
no step waits for a disk, however slow, full or broken that is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock_common.clock import Clock
from penstock_shard.kv_transfer.arena import RecordName
from penstock_shard.kv_transfer.segments import Key, Segments

logger = logging.getLogger(__name__)

# Records that wait to be written; and that were read, and wait to be taken.
_MOST_BYTES = 64 * 2**20
# After an error nothing is written for so long, and no more often than this there is a line of it.
_PAUSE_S = 30.0
# One that takes longer is not asked for more.
_HUNG_S = 1.0
# At least so often what is too old is looked for.
_EXPIRE_S = 60.0


@dataclass(eq=False, slots=True)
class Read:
    """A record that is wanted; `record` is there if it was read and is whole. One that is discarded
    is wanted no more.
    """

    name: RecordName
    record: bytes | None = None
    is_discarded: bool = False


class DiskTier:
    """Segments in a directory, and the thread that alone touches its files."""

    def __init__(
        self,
        segments: Segments,
        on_done: Callable[[], None] = lambda: None,
        *,
        with_salted: bool = False,
        max_bytes: int = _MOST_BYTES,
        clock: Clock = time.monotonic,
    ) -> None:
        """`on_done` is called, in the thread, when `take` has something new, when all is written,
        or when what is there has changed by itself. Of what waits to be written or taken there are
        `max_bytes`.
        """
        self._segments = segments
        self._on_done = on_done
        self._with_salted = with_salted
        self._max_bytes = max_bytes
        self._clock = clock
        # Guards what follows, and tells the thread of news.
        self._news = threading.Condition()
        self._reads: deque[Read] = deque()
        self._writes: deque[tuple[RecordName, bytes]] = deque()
        # Names of `_writes`: what is written twice is of no use.
        self._written: set[Key] = set()
        self._write_bytes = 0
        self._done: deque[Read] = deque()
        self._done_bytes = 0
        self._is_closed = False
        # When the thread began what it does; None while it waits.
        self._busy_since_s: float | None = None
        self._complained_s = self._paused_until_s = -_PAUSE_S
        # Blocks since the engine's start: written, read, found to be damaged, and not written as
        # the disk was too slow or failed.
        self.saved_total = 0
        self.loaded_total = 0
        self.damaged_total = 0
        self.dropped_total = 0
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    @property
    def num_blocks(self) -> int:
        """Blocks that the disk has."""
        return self._segments.num_records

    @property
    def hangs(self) -> bool:
        """Whether what the thread does takes long: nothing should wait for it."""
        since_s = self._busy_since_s
        return since_s is not None and self._clock() - since_s > _HUNG_S

    @property
    def has_room(self) -> bool:
        """Whether less waits to be written than half of what may."""
        return 2 * self._write_bytes < self._max_bytes

    @property
    def is_writing(self) -> bool:
        """Whether anything waits to be written, or is being written."""
        return bool(self._written)

    def has(self, group: int, digest: bytes) -> bool:
        """Whether the disk has the block, though maybe damaged."""
        return self._segments.has((group, digest))

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` gives any."""
        return bool(self._segments.changes)

    def take_changes(self, most: int) -> list[tuple[int, bytes]]:
        """Blocks that came or went since, at most so many: index in its prefix, and hash."""
        changes = self._segments.changes
        # Only this thread takes; the other may drop the oldest meanwhile, but only of a full deque.
        return [changes.popleft() for _ in range(min(most, len(changes)))]

    def save(self, name: RecordName, record: Callable[[], bytes]) -> None:
        """Have a record written, unless it is there, must not be, or too much waits already."""
        key = name.group, name.digest
        if (name.is_salted and not self._with_salted) or self._segments.has(key):
            return
        with self._news:
            if key in self._written:
                return
            copied = record() if self._write_bytes < self._max_bytes else b""
            if not copied or self._write_bytes + len(copied) > self._max_bytes:
                self.dropped_total += 1
                return
            self._writes.append((name, copied))
            self._written.add(key)
            self._write_bytes += len(copied)
            self._news.notify()

    def read(self, read: Read) -> None:
        """Have a record read: `take` returns it, whether it was found or not."""
        with self._news:
            self._reads.append(read)
            self._news.notify()

    def take(self, most: int) -> list[Read]:
        """What was read since, at most so many."""
        taken: list[Read] = []
        with self._news:
            while self._done and len(taken) < most:
                taken.append(self._done.popleft())
                self._done_bytes -= len(taken[-1].record or b"")
            self._news.notify()
        return taken

    def close(self) -> None:
        """End the thread, when what it does is done; what waits is dropped."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        self._busy_since_s = self._clock()
        self._try(self._segments.scan)
        if self.num_blocks:
            logger.info("%d KV blocks are found on disk", self.num_blocks)
            self._on_done()
        while True:
            num_blocks = self.num_blocks
            self._try(self._segments.expire)
            if self.num_blocks < num_blocks:
                self._on_done()
            if (task := self._next()) is None:
                return
            task()

    def _next(self) -> Callable[[], None] | None:
        """What to do: reads first, as somebody waits for them. None when closed."""
        end_s = time.monotonic() + _EXPIRE_S
        with self._news:
            self._busy_since_s = None
            while not self._is_closed:
                if self._reads and self._done_bytes < self._max_bytes:
                    read = self._reads.popleft()
                    self._busy_since_s = self._clock()
                    return lambda: self._read(read)
                if self._writes:
                    name, record = self._writes.popleft()
                    self._busy_since_s = self._clock()
                    return lambda: self._write(name, record)
                if not self._news.wait(end_s - time.monotonic()):
                    return lambda: None
        return None

    def _read(self, read: Read) -> None:
        if read.is_discarded:
            return
        was_there = self.has(read.name.group, read.name.digest)
        self._try(lambda: self._read_into(read))
        if read.record is not None:
            self.loaded_total += 1
        elif was_there and not self.has(read.name.group, read.name.digest):
            self.damaged_total += 1
        with self._news:
            self._done.append(read)
            self._done_bytes += len(read.record or b"")
        self._on_done()

    def _read_into(self, read: Read) -> None:
        read.record = self._segments.read(read.name)

    def _write(self, name: RecordName, record: bytes) -> None:
        is_paused = self._clock() < self._paused_until_s
        if not is_paused and self._try(lambda: self._segments.append(name, record)):
            self.saved_total += 1
        else:
            self.dropped_total += 1
            if not is_paused:
                self._paused_until_s = self._clock() + _PAUSE_S
        with self._news:
            self._write_bytes -= len(record)
            self._written.discard((name.group, name.digest))
            is_last = not self._writes
        if is_last:
            self._on_done()

    def _try(self, act: Callable[[], None]) -> bool:
        """Whether it went well; a line, now and then, if not."""
        try:
            act()
        except OSError as error:
            if self._clock() - self._complained_s >= _PAUSE_S:
                self._complained_s = self._clock()
                logger.warning(
                    "KV blocks on disk %s: %s; requests are computed without",
                    self._segments.directory,
                    error.strerror or error,
                )
            return False
        return True
