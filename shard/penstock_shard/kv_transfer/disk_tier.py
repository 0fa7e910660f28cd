"""Copies of KV blocks on a disk, below host memory. A thread reads and writes them, so that no step
waits for a slow, full or broken disk.
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

# At most this many bytes of records wait to be written, and of read records to be taken.
_MOST_BYTES = 64 * 2**20
# Seconds without writes after an error, and the least time between log lines about errors.
_PAUSE_S = 30.0
# If a task takes longer, the disk gets no more reads.
_HUNG_S = 1.0
# Longest time between two searches for records that are too old.
_EXPIRE_S = 60.0


@dataclass(eq=False, slots=True)
class Read:
    """A record to read. `record` is None until it is read, or if the disk has no intact record. If
    `is_discarded`, nothing wants the record any more.
    """

    name: RecordName
    record: bytes | None = None
    is_discarded: bool = False


class DiskTier:
    """The segments in a directory. Only its thread touches the files."""

    def __init__(
        self,
        segments: Segments,
        on_done: Callable[[], None] = lambda: None,
        *,
        with_salted: bool = False,
        max_bytes: int = _MOST_BYTES,
        clock: Clock = time.monotonic,
    ) -> None:
        """Start the thread. It calls `on_done` when `take` has something new, all records are
        written, or records were found or expired. At most `max_bytes` of records wait to be
        written, and as many of read records wait for `take`.
        """
        self._segments = segments
        self._on_done = on_done
        self._with_salted = with_salted
        self._max_bytes = max_bytes
        self._clock = clock
        # Guards the following fields and wakes the thread.
        self._news = threading.Condition()
        self._reads: deque[Read] = deque()
        self._writes: deque[tuple[RecordName, bytes]] = deque()
        # Keys of records that wait or are being written, so that none is written twice.
        self._written: set[Key] = set()
        self._write_bytes = 0
        self._done: deque[Read] = deque()
        self._done_bytes = 0
        self._is_closed = False
        # The time at which the thread began its task; None while it waits.
        self._busy_since_s: float | None = None
        self._complained_s = self._paused_until_s = -_PAUSE_S
        # Blocks since the engine's start: written, read, found damaged, and not written because the
        # disk was too slow or failed.
        self.saved_total = 0
        self.loaded_total = 0
        self.damaged_total = 0
        self.dropped_total = 0
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, float]:
        return {
            "kv_disk_blocks": self.num_blocks,
            "kv_disk_saved_blocks_total": self.saved_total,
            "kv_disk_loaded_blocks_total": self.loaded_total,
            "kv_disk_damaged_blocks_total": self.damaged_total,
            "kv_disk_dropped_blocks_total": self.dropped_total,
        }

    @property
    def num_blocks(self) -> int:
        return self._segments.num_records

    @property
    def hangs(self) -> bool:
        """True if the thread's task takes so long that nothing should wait for it."""
        since_s = self._busy_since_s
        return since_s is not None and self._clock() - since_s > _HUNG_S

    @property
    def has_room(self) -> bool:
        """True if less than half of `max_bytes` waits to be written."""
        return 2 * self._write_bytes < self._max_bytes

    @property
    def is_writing(self) -> bool:
        return bool(self._written)

    def has(self, group: int, digest: bytes) -> bool:
        """Tell whether the disk has a block, which may be damaged."""
        return self._segments.has((group, digest))

    @property
    def has_changes(self) -> bool:
        return bool(self._segments.changes)

    def take_changes(self, most: int) -> list[tuple[int, bytes]]:
        changes = self._segments.changes
        # Only this thread takes changes. The disk's thread drops the oldest only if the deque is
        # full.
        return [changes.popleft() for _ in range(min(most, len(changes)))]

    def save(self, name: RecordName, record: Callable[[], bytes]) -> None:
        """Have a record written, unless the disk has it, must not have it, or has too much to
        write.
        """
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
        """Queue a read. `take` returns it later, even if nothing was found."""
        with self._news:
            self._reads.append(read)
            self._news.notify()

    def take(self, most: int) -> list[Read]:
        taken: list[Read] = []
        with self._news:
            while self._done and len(taken) < most:
                taken.append(self._done.popleft())
                self._done_bytes -= len(taken[-1].record or b"")
            self._news.notify()
        return taken

    def close(self) -> None:
        """End the thread after its current task. Waiting tasks are dropped."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._thread.join()

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
        """Wait for a task and return it; None when closed. Reads come first: sequences wait for
        them.
        """
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
        """Run `act`. Return False after an OSError, and log such errors now and then."""
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
