"""Files with records of KV blocks, in a directory that one process at a time uses.

Records are appended to the newest file, a segment. The oldest segment is deleted if it is too old
or the directory too large; nothing is moved or changed. A record has the same bytes as in host
memory. Its checksums reveal damage by a crash, so no write is synced.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock_common.clock import Clock
from penstock_shard.device.cache_directory import ensure_safe_directory
from penstock_shard.kv_transfer.arena import Arena, RecordName

_MAGIC = b"penstock KV\0"
# A segment's header: magic, namespace, and CRC-32 of both.
_HEADER = struct.Struct("<12s16sI")
_SUFFIX = ".kv"
# A segment takes at most 1/16 of the directory's bytes, and records from at most 1/16 of the age
# limit.
_PARTS = 16
_LOCK_WAIT_S = 5.0
# At most this many changes wait to be taken. The oldest are forgotten.
_MOST_CHANGES = 2**20

# A block's group and its chained hash.
Key = tuple[int, bytes]


class DirectoryTaken(Exception):
    """Raised if another process has locked the directory."""


def lock_directory(path: Path, wait_s: float = _LOCK_WAIT_S) -> int:
    """Make and lock a directory, until the returned descriptor is closed. Waits up to `wait_s` for
    an engine that is ending, then raises DirectoryTaken. Raises OSError if the directory cannot be
    used or others may write to it.
    """
    ensure_safe_directory(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    end_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= end_s:
                os.close(descriptor)
                raise DirectoryTaken(f"{path} is used by another shard") from None
            time.sleep(0.05)


@dataclass(slots=True)
class _Segment:
    """A file, named by its creation time in milliseconds since the epoch. `keys` lists its records;
    empty if the file belongs to another namespace.
    """

    path: Path
    created_ms: int
    num_bytes: int
    is_ours: bool = True
    keys: list[Key] = field(default_factory=list)


class Segments:
    """A directory's files, and the place of each record of a namespace. One thread reads and
    writes; any thread may call `has`.
    """

    def __init__(
        self,
        directory: Path,
        namespace: bytes,
        arena: Arena,
        *,
        max_bytes: int,
        age_s: float,
        with_salted: bool = False,
        clock: Clock = time.time,
    ) -> None:
        """List the files. `arena` parses records. Salted records are ignored without `with_salted`.

        Raises:
            ValueError: `max_bytes` is less than a segment with the largest record.
            OSError: the directory cannot be read.
        """
        self.directory = directory
        self._header = _header(namespace)
        self._arena = arena
        self._max_bytes = max_bytes
        least = _HEADER.size + arena.most_record_bytes
        if max_bytes < least:
            raise ValueError(f"one block needs {least} bytes")
        self._segment_bytes = max(least, max_bytes // _PARTS)
        self._age_ms = int(age_s * 1000)
        self._with_salted = with_salted
        self._clock = clock
        self._segments = sorted(_files(directory), key=lambda segment: segment.created_ms)
        # The newest segment, if this process made it and no write to it failed.
        self._open: _Segment | None = None
        # For each record: its segment, offset, and the index of its block.
        self._places: dict[Key, tuple[_Segment, int, int]] = {}
        # Added or removed records, by index and hash. Any thread may take them.
        self.changes: deque[tuple[int, bytes]] = deque(maxlen=_MOST_CHANGES)

    @property
    def num_records(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self._segments)

    def has(self, key: Key) -> bool:
        """Tell whether a record exists, which may be damaged."""
        return key in self._places

    def scan(self) -> None:
        """Find the records, newest segments first, by their headers alone. A segment is read up to
        its first torn or damaged record. Raises the first OSError after trying all segments.
        """
        failure: OSError | None = None
        for segment in reversed(self._segments):
            try:
                self._scan_segment(segment)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _scan_segment(self, segment: _Segment) -> None:
        with segment.path.open("rb") as file:
            segment.is_ours = file.read(_HEADER.size) == self._header
            if segment.is_ours:
                for name, offset in self._scan(file.fileno(), segment.num_bytes):
                    if self.has(_key(name)):
                        segment.keys.append(_key(name))
                    else:
                        self._place(name, segment, offset)

    def _scan(self, file: int, num_bytes: int) -> Iterator[tuple[RecordName, int]]:
        offset = _HEADER.size
        while True:
            header = os.pread(file, self._arena.header_bytes, offset)
            if len(header) < self._arena.header_bytes:
                return
            name = self._arena.name_of(memoryview(header))
            if name is None or offset + self._arena.record_bytes(name.group) > num_bytes:
                return
            if self._with_salted or not name.is_salted:
                yield name, offset
            offset += self._arena.record_bytes(name.group)

    def read(self, name: RecordName) -> bytes | None:
        """Return a record; None if it is missing or damaged. Forget a damaged record. Raises
        OSError.
        """
        segment, offset, _ = self._places.get(_key(name), (None, 0, 0))
        if segment is None:
            return None
        with segment.path.open("rb", buffering=0) as file:
            record = os.pread(file.fileno(), self._arena.record_bytes(name.group), offset)
        if self._arena.is_whole(memoryview(record), name):
            return record
        self._forget(_key(name))
        return None

    def append(self, name: RecordName, record: bytes) -> None:
        """Write a record, after deleting segments until it fits. Raises OSError if it is not
        written.
        """
        segment = self._open
        if segment is None or not self._takes(segment, len(record)):
            # After an error no segment is open: nothing may follow a torn record.
            self._open = None
            self._make_room(_HEADER.size + len(record))
            segment = self._create()
        else:
            self._make_room(len(record))
        self._open = None
        offset = segment.num_bytes
        self._write(segment, record)
        self._place(name, segment, offset)
        self._open = segment

    def expire(self) -> None:
        """Delete segments that are too old or, after a change of the clock, equally far in the
        future. Raises OSError.
        """
        now_ms = self._now_ms()
        for segment in list(self._segments):
            if abs(now_ms - segment.created_ms) > self._age_ms:
                self._delete(segment)

    def _takes(self, segment: _Segment, num_bytes: int) -> bool:
        is_young = self._now_ms() - segment.created_ms <= self._age_ms // _PARTS
        fits = segment.num_bytes + num_bytes <= self._segment_bytes
        return is_young and fits and self._max_bytes >= self.num_bytes + num_bytes

    def _make_room(self, num_bytes: int) -> None:
        """Delete segments of other namespaces, then the oldest, until `num_bytes` fit."""
        while self._segments and self.num_bytes + num_bytes > self._max_bytes:
            self._delete(min(self._segments, key=lambda each: (each.is_ours, each.created_ms)))

    def _create(self) -> _Segment:
        newest = self._segments[-1].created_ms if self._segments else 0
        created_ms = max(self._now_ms(), newest + 1)
        path = self.directory / f"{created_ms:016d}{_SUFFIX}"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        segment = _Segment(path, created_ms, 0)
        self._segments.append(segment)
        try:
            self._write(segment, self._header)
        except OSError:
            # Otherwise each try on a full disk would leave an empty file.
            self._delete(segment)
            raise
        return segment

    def _write(self, segment: _Segment, data: bytes) -> None:
        try:
            append(segment.path, data)
        finally:
            # A failed write may have left a part of the data.
            segment.num_bytes = segment.path.stat().st_size

    def _delete(self, segment: _Segment) -> None:
        segment.path.unlink(missing_ok=True)
        self._segments.remove(segment)
        if self._open is segment:
            self._open = None
        for key in segment.keys:
            if self._places.get(key, (None,))[0] is segment:
                self._forget(key)

    def _place(self, name: RecordName, segment: _Segment, offset: int) -> None:
        self._places[_key(name)] = segment, offset, name.index
        segment.keys.append(_key(name))
        self.changes.append((name.index, name.digest))

    def _forget(self, key: Key) -> None:
        *_, index = self._places.pop(key)
        self.changes.append((index, key[1]))

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def append(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]


def _files(directory: Path) -> Iterator[_Segment]:
    for path in directory.iterdir():
        if path.suffix == _SUFFIX and path.stem.isdecimal() and path.exists():
            yield _Segment(path, int(path.stem), path.stat().st_size)


def _header(namespace: bytes) -> bytes:
    checked = _MAGIC + namespace
    return checked + zlib.crc32(checked).to_bytes(4, "little")


def _key(name: RecordName) -> Key:
    return name.group, name.digest
