"""Copies of KV blocks on a disk: bounded, found again, never wrong, never waited for by a step."""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.engines import runner_info
from support.processes import wait_until

from penstock_shard.kv_transfer import segments as segments_module
from penstock_shard.kv_transfer.arena import Arena, RecordName
from penstock_shard.kv_transfer.disk_tier import DiskTier, Read
from penstock_shard.kv_transfer.segments import DirectoryTaken, Segments, lock_directory

_NAMESPACE = b"n" * 16
_HEADER_BYTES = 32


def _name(number: int, *, is_salted: bool = False) -> RecordName:
    digest = number.to_bytes(16, "big")
    return RecordName(0, number, digest, b"p" * 16, tuple(range(16)), is_salted)


class _Disk:
    """A directory, and records for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_s = 1000.0
        self.arena = Arena(memoryview(bytearray(2**16)), runner_info())

    def record(self, name: RecordName) -> bytes:
        def fill(into: memoryview) -> None:
            into[:] = bytes([name.index % 256]) * len(into)

        self.arena.write(0, name, fill)
        return bytes(self.arena.record(0, 0))

    @property
    def record_bytes(self) -> int:
        return self.arena.record_bytes(0)

    @property
    def paths(self) -> list[Path]:
        return sorted(self.directory.glob("*.kv"))

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def open(
        self,
        *,
        max_bytes: int = 2**20,
        age_s: float = 3600.0,
        with_salted: bool = False,
        namespace: bytes = _NAMESPACE,
    ) -> Segments:
        segments = self.closed(
            max_bytes=max_bytes, age_s=age_s, with_salted=with_salted, namespace=namespace
        )
        segments.scan()
        return segments

    def closed(
        self,
        *,
        max_bytes: int = 2**20,
        age_s: float = 3600.0,
        with_salted: bool = False,
        namespace: bytes = _NAMESPACE,
    ) -> Segments:
        """Return segments that have not been scanned, so that nothing is known of them yet."""
        return Segments(
            self.directory,
            namespace,
            self.arena,
            max_bytes=max_bytes,
            age_s=age_s,
            with_salted=with_salted,
            clock=lambda: self.now_s,
        )

    def fill(self, count: int, **how: int) -> Segments:
        segments = self.open(**how)  # type: ignore[arg-type]
        for number in range(count):
            segments.append(_name(number), self.record(_name(number)))
        return segments


@pytest.fixture
def disk(tmp_path: Path) -> _Disk:
    return _Disk(tmp_path)


def _found(segments: Segments, count: int) -> list[int]:
    return [number for number in range(count) if segments.read(_name(number)) is not None]


def test_what_was_written_is_found_by_the_next_process(disk: _Disk) -> None:
    disk.fill(5)
    again = disk.open()
    assert again.read(_name(3)) == disk.record(_name(3))
    assert _found(again, 9) == [0, 1, 2, 3, 4]
    assert [path.stat().st_mode & 0o777 for path in disk.paths] == [0o600]


def test_bytes_are_never_over_the_bound_and_the_oldest_go_first(disk: _Disk) -> None:
    bound = 8 * (disk.record_bytes + _HEADER_BYTES)
    segments = disk.open(max_bytes=bound)
    for number in range(40):
        segments.append(_name(number), disk.record(_name(number)))
        assert disk.num_bytes == segments.num_bytes <= bound
    assert _found(segments, 40) == list(range(32, 40))
    assert _found(disk.open(max_bytes=bound), 40) == list(range(32, 40))


def test_a_bound_below_one_record_is_refused_with_what_it_needs(disk: _Disk) -> None:
    least = disk.record_bytes + _HEADER_BYTES
    disk.fill(3, max_bytes=least)
    with pytest.raises(ValueError, match=f"one block needs {least} bytes"):
        disk.open(max_bytes=least - 1)


@pytest.mark.parametrize("at_byte", [-1, 70, 30, 3], ids=["block", "tokens", "digest", "mark"])
def test_a_flipped_bit_is_found(disk: _Disk, at_byte: int) -> None:
    disk.fill(4)
    (path,) = disk.paths
    data = bytearray(path.read_bytes())
    data[_HEADER_BYTES + (2 + (at_byte < 0)) * disk.record_bytes + at_byte] ^= 16
    path.write_bytes(data)
    again = disk.open()
    # Headers are checked when the directory is scanned: nothing behind a damaged one is found.
    assert again.num_records == (4 if at_byte < 0 else 2)
    assert _found(again, 4) == ([0, 1, 3] if at_byte < 0 else [0, 1])
    assert not again.has((0, _name(2).digest))


@pytest.mark.parametrize("cut", [1, 200, 260])
def test_a_truncated_record_is_dropped(disk: _Disk, cut: int) -> None:
    disk.fill(3)
    (path,) = disk.paths
    os.truncate(path, path.stat().st_size - cut)
    again, left = disk.open(), [0, 1] if cut < disk.record_bytes else [0]
    assert again.num_records == len(left)
    assert _found(again, 3) == left


def test_another_namespace_finds_nothing_and_deletes_it_first(disk: _Disk) -> None:
    own = disk.fill(3)
    other = disk.open(namespace=b"o" * 16)
    assert (other.num_records, other.num_bytes) == (0, own.num_bytes)
    other.append(_name(7), disk.record(_name(7)))
    # The namespace's own is the older one now.
    bound = own.num_bytes + _HEADER_BYTES + 2 * disk.record_bytes
    again = disk.open(max_bytes=bound)
    again.append(_name(8), disk.record(_name(8)))
    assert _found(again, 9) == [0, 1, 2, 8]


def test_what_is_too_old_is_deleted(disk: _Disk) -> None:
    segments = disk.fill(3)
    disk.now_s += 3000
    segments.append(_name(8), disk.record(_name(8)))
    segments.expire()
    assert _found(segments, 9) == [0, 1, 2, 8]
    disk.now_s += 601
    segments.expire()
    assert _found(segments, 9) == [8]
    disk.now_s -= 9000
    segments.expire()
    assert disk.paths == []


def test_one_process_has_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "new"
    descriptor = lock_directory(path)
    assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(DirectoryTaken, match="is used by another shard"):
        lock_directory(path, wait_s=0.1)
    os.close(descriptor)
    os.close(lock_directory(path, wait_s=0.1))
    path.chmod(0o777)
    with pytest.raises(PermissionError, match="mode 777"):
        lock_directory(path)


# ---- the thread ----


@pytest.fixture
def tiers() -> Iterator[Callable[..., DiskTier]]:
    made: list[DiskTier] = []

    def make(segments: Segments, **how: int) -> DiskTier:
        made.append(DiskTier(segments, **how))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def _read(tier: DiskTier, number: int) -> bytes | None:
    read = Read(_name(number))
    tier.read(read)
    taken: list[Read] = []

    def has_come() -> bool:
        taken[len(taken) :] = tier.take(9)
        return bool(taken)

    wait_until(has_come, timeout_s=5, what="a read")
    assert taken == [read]
    return read.record


def _settle(tier: DiskTier, count: int) -> None:
    wait_until(
        lambda: tier.saved_total + tier.dropped_total == count, timeout_s=5, what="all is written"
    )


def test_salted_records_are_written_where_that_is_asked_for(
    disk: _Disk, tiers: Callable[..., DiskTier]
) -> None:
    salted = _name(1, is_salted=True)
    for with_salted in (False, True):
        segments = disk.open(with_salted=with_salted)
        tier = tiers(segments, with_salted=with_salted)
        tier.save(salted, lambda: disk.record(salted))
        tier.save(_name(2), lambda: disk.record(_name(2)))
        _settle(tier, 1)
        assert segments.has((0, salted.digest)) is with_salted
    assert not disk.open().has((0, salted.digest))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_is_one_line_of_the_log(
    disk: _Disk,
    tiers: Callable[..., DiskTier],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    segments = disk.fill(2)
    before = disk.num_bytes

    def fail(path: Path, data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data[:20])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(segments_module, "append", fail)
    tier = tiers(segments)
    for number in range(2, 8):
        tier.save(_name(number), functools.partial(disk.record, _name(number)))
    _settle(tier, 6)
    assert (tier.saved_total, tier.dropped_total) == (0, 6)
    told = f"KV blocks on disk {segments.directory}: {os.strerror(code)}; "
    assert caplog.messages.count(told + "requests are computed without") == 1
    # It was tried once, and what is there is found.
    assert disk.num_bytes == segments.num_bytes == before + 20
    assert _read(tier, 1) is not None
    monkeypatch.undo()
    segments.append(_name(8), disk.record(_name(8)))
    assert _found(disk.open(), 9) == [0, 1, 8]


def test_a_full_disk_does_not_fill_with_empty_files(
    disk: _Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    segments = disk.open()
    monkeypatch.setattr(segments_module, "append", fail)
    for number in range(3):
        with pytest.raises(OSError, match="full"):
            segments.append(_name(number), disk.record(_name(number)))
    assert not list(disk.directory.iterdir())


def test_a_link_that_leads_nowhere_is_no_segment(disk: _Disk) -> None:
    disk.fill(2)
    (disk.directory / f"{1:016d}.kv").symlink_to(disk.directory / "nowhere")
    assert _found(disk.open(), 2) == [0, 1]


def test_a_slow_disk_is_not_waited_for(
    disk: _Disk, tiers: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = disk.fill(2)
    goes_on, has_begun = threading.Event(), threading.Event()
    now_s = [0.0]

    def read(name: RecordName) -> bytes | None:
        has_begun.set()
        goes_on.wait()
        return None

    monkeypatch.setattr(segments, "read", read)
    bound = 4 * disk.record_bytes - 1
    tier = tiers(segments, clock=lambda: now_s[0], max_bytes=bound)
    waiting, discarded = Read(_name(0)), Read(_name(1))
    tier.read(waiting)
    tier.read(discarded)
    assert has_begun.wait(5)
    assert not tier.hangs
    now_s[0] = 1.5
    assert tier.hangs
    for number in range(2, 8):
        tier.save(_name(number), functools.partial(disk.record, _name(number)))
    assert tier.dropped_total == 3
    discarded.is_discarded = True
    goes_on.set()
    _settle(tier, 6)
    assert tier.take(9) == [waiting]
    assert not tier.hangs


def test_a_damaged_block_is_counted(disk: _Disk, tiers: Callable[..., DiskTier]) -> None:
    disk.fill(2)
    (path,) = disk.paths
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tier = tiers(disk.open())
    assert (_read(tier, 0), _read(tier, 1)) == (disk.record(_name(0)), None)
    assert (tier.loaded_total, tier.damaged_total) == (1, 1)
    assert not tier.has(0, _name(1).digest)


def test_errors_of_reading_are_one_line_of_the_log(
    disk: _Disk,
    tiers: Callable[..., DiskTier],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    segments = disk.fill(2)

    def fail(name: RecordName) -> bytes | None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(segments, "read", fail)
    tier = tiers(segments)
    assert [_read(tier, number) for number in (0, 1)] == [None, None]
    assert sum("broken" in line for line in caplog.messages) == 1


def test_a_segment_that_cannot_be_read_hides_no_other(disk: _Disk) -> None:
    for at_s in (1000.0, 2000.0):
        disk.now_s = at_s
        segments = disk.open()
        segments.append(_name(int(at_s)), disk.record(_name(int(at_s))))
    newest = disk.paths[-1]
    newest.unlink()
    newest.mkdir()
    again = disk.closed()
    with pytest.raises(IsADirectoryError):
        again.scan()
    assert again.num_records == 1
