"""The audit log: requests, outputs and shards, one JSON line per request.

A line is `{"version", "keyed", "sequence", "previous", "record", "chain"}`. `chain` is a BLAKE2b
hash over the line's other bytes, and `previous` is the chain of the line before, so a reader finds
edited, removed and added lines. The files of a rotated log, joined with `cat` (oldest first), are
one log. Two changes stay unnoticed:

- Without `key`, anybody who can write the file can compute every hash anew.
- A log without its last lines is still in order. Compare it with a copy elsewhere.

Records that could not be written (a full disk, a full queue) have sequence numbers too: a missing
number in an intact chain is a dropped record. If the process writes no record after dropped ones,
its last log message counts them, because the next process uses their numbers again.

Prompts are written only on request; otherwise only their length and a keyed hash. With a plain or
salted hash, anybody could find a short prompt by trying. Without a key, the process draws a random
one, and the hashes only show which prompts of one run are equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shlex
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock_client.dataclass_json import compact_json, from_plain, plain_ids, require, to_plain
from penstock_proto.types import FinishReason, GenerationRequest

logger = logging.getLogger(__name__)

VERSION = 1
_MIN_KEY_BYTES = 16
_MAX_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE
_NO_CHAIN = "0" * 64
_LINE = re.compile(rb'(\{.*),"chain":"([0-9a-f]{64})"\}', re.DOTALL)
_TAIL_BYTES = 64 * 1024

# Memory is bounded too: a waiting token id takes about 36 bytes.
_MAX_QUEUED_RECORDS = 4096
_MAX_QUEUED_TOKENS = 4_000_000
_SAME_TROUBLE_S = 60.0
# Seconds without a dropped record after which the next written record ends the gap.
_OVER_S = 1.0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class WithheldPrompt:
    """Replaces a prompt in a record; `hash` is from `prompt_hash`."""

    tokens: int
    hash: str


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A request and its outcome.

    The request should be as sent: with a seed, even if the user gave none. `output_token_ids` has
    only new tokens, not the request's own. After an error there is no `finish_reason`.
    """

    request_id: str
    request: GenerationRequest
    output_token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    # The shard's name for the model; the request may have used an alias or none.
    model: str = ""
    weights_hash: str = ""
    # Fingerprints of the shards' numerics, in order of use; "" if bits are not reproducible.
    numerics_fingerprints: Sequence[str] = ()
    # True if the request continued under other numerics, so its tokens may not be reproducible.
    approximate: bool = False
    attempts: int = 1
    # ISO 8601, UTC.
    when: str = field(default_factory=_now)
    # Set if the log leaves prompts out; the request's prompt is empty then.
    withheld_prompt: WithheldPrompt | None = None


def prompt_hash(prompt_token_ids: Sequence[int], key: bytes) -> str:
    """Return the hash that a log with this key writes for a prompt. It hashes the ids as compact
    JSON.
    """
    text = compact_json(plain_ids(prompt_token_ids))
    return _hash(text.encode(), key, b"penstock prompt")


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Return the key in a file, without surrounding whitespace. Raise `OSError`, or `ValueError` if
    the key is too short or too long.
    """
    key = Path(path).read_bytes().strip()
    _check_key(key)
    return key


def _check_key(key: bytes) -> None:
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise ValueError(
            f"an audit key has {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes, not {len(key)}"
        )


def _hash(data: bytes, key: bytes, purpose: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32, key=key, person=purpose).hexdigest()


# ---- writing ----


class AuditLog:
    """Appends records to a file from its own thread. Only one log may write to a file at a time.

    Records are written to the system at once, but synced to the disk only at `close`. A process
    that dies loses queued records; a machine that dies loses the last seconds. Do not move the open
    file: the log rotates it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        prompts: bool = False,
        max_bytes: int = 256 * 1024 * 1024,
        keep: int = 8,
        key: bytes | None = None,
        on_drop: Callable[[int], None] | None = None,
    ) -> None:
        """Continue the log at `path`, or begin one, for its owner only (mode 0600).

        `keep` older files of about `max_bytes` each stay; `path.1` is the latest. `on_drop` is
        called in any thread with the number of records not written.

        Raises:
            OSError: one line; the file cannot be opened, is a link, another user's, open to
                others, in use by another log, or no audit log.
            ValueError: a value is out of its bounds.
        """
        if max_bytes < 1 or keep < 1:
            raise ValueError(f"max_bytes ({max_bytes}) and keep ({keep}) must be at least 1")
        if key is not None:
            _check_key(key)
        self._prompts = prompts
        self._key = key or b""
        self._on_drop = on_drop
        self._prompt_key = key or secrets.token_bytes(_MAX_KEY_BYTES)
        self._file = _RotatingFile(Path(path), max_bytes, keep)
        self._sequence, self._chain = self._file.mark
        self._written = self._sequence
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, AuditRecord, int]] = deque()
        self._queued_tokens = 0
        self._dropped_total = 0
        self._told_at_s = -math.inf
        # Numbers of records dropped since the last reported gap; below, the time of the last drop.
        self._missing: list[int] = []
        self._dropped_at_s = -math.inf
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)
        self._thread.start()

    @property
    def dropped_total(self) -> int:
        return self._dropped_total

    def record(self, record: AuditRecord) -> None:
        """Queue the record. Neither wait nor raise: a record that cannot be written is dropped."""
        tokens = _tokens(record)
        with self._changed:
            sequence = self._sequence = self._sequence + 1
            full = (
                len(self._queue) >= _MAX_QUEUED_RECORDS or self._queued_tokens >= _MAX_QUEUED_TOKENS
            )
            taken = not (full or self._closed)
            if taken:
                self._queue.append((sequence, record, tokens))
                self._queued_tokens += tokens
                self._changed.notify()
        if not taken:
            self._drop([sequence], "its disk is too slow" if full else "it was closed")

    def close(self, timeout_s: float = 10.0) -> None:
        """Write queued records and close the file. Block until then, or until the timeout."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                left = [sequence for sequence, _, _ in self._queue]
                self._queue.clear()
            self._drop(left, f"its disk did not take them within {timeout_s:g} s")
        self._tell_of_end()

    def _drop(self, sequences: Sequence[int], why: str) -> None:
        """Count dropped records; log at most once a minute."""
        if self._on_drop is not None:
            self._on_drop(len(sequences))
        now_s = time.monotonic()
        with self._changed:
            self._dropped_total += len(sequences)
            self._missing.extend(sequences)
            self._dropped_at_s = now_s
            tell = now_s - self._told_at_s >= _SAME_TROUBLE_S
            if tell:
                self._told_at_s = now_s
        if tell:
            logger.error(
                "audit log %s drops records (%d so far): %s",
                self._file.path,
                self._dropped_total,
                why,
            )

    def _tell_of_end(self) -> None:
        """Log that the last records are missing, because no gap in the numbers shows it."""
        with self._changed:
            lost = sum(number > self._written for number in self._missing)
        if lost:
            logger.error(
                "audit log %s ends without its last %d records; its numbers do not show that, as "
                "the next start goes on with %d",
                *(self._file.path, lost, self._written + 1),
            )

    # ---- in the thread ----

    def _run(self) -> None:
        while (entry := self._take()) is not None:
            self._write(*entry)
        self._file.close()

    def _take(self) -> tuple[int, AuditRecord] | None:
        """Take the next record and its number; None if the log is closed and the queue is empty."""
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            if not self._queue:
                return None
            sequence, record, tokens = self._queue.popleft()
            self._queued_tokens -= tokens
            return sequence, record

    def _write(self, sequence: int, record: AuditRecord) -> None:
        try:
            line, chain = self._line(sequence, record)
            self._file.append(line)
        except (TypeError, ValueError, OverflowError, OSError) as error:
            self._drop([sequence], str(error))
        else:
            self._chain, self._written = chain, sequence
            self._tell_of_gap(sequence)

    def _tell_of_gap(self, written: int) -> None:
        with self._changed:
            missing = self._missing
            if not missing or time.monotonic() - self._dropped_at_s < _OVER_S:
                return
            first, last = min(missing), max(missing)
            if written < last:
                return
            self._missing = []
        logger.warning(
            "audit log %s writes again: %d records are missing, of the numbers %d to %d",
            *(self._file.path, len(missing), first, last),
        )

    def _line(self, sequence: int, record: AuditRecord) -> tuple[bytes, str]:
        if not self._prompts:
            record = self._without_prompt(record)
        entry = {
            "version": VERSION,
            "keyed": bool(self._key),
            "sequence": sequence,
            "previous": self._chain,
            "record": to_plain(AuditRecord, record),
        }
        body = compact_json(entry).encode()
        chain = _chain(body, self._key)
        return b'%s,"chain":"%s"}\n' % (body[:-1], chain.encode()), chain

    def _without_prompt(self, record: AuditRecord) -> AuditRecord:
        prompt = record.request.prompt_token_ids
        return dataclasses.replace(
            record,
            request=dataclasses.replace(record.request, prompt_token_ids=()),
            withheld_prompt=WithheldPrompt(len(prompt), prompt_hash(prompt, self._prompt_key)),
        )


def _tokens(record: AuditRecord) -> int:
    request = record.request
    ids = (request.prompt_token_ids, request.output_token_ids, record.output_token_ids)
    try:
        return sum(map(len, ids))
    except TypeError:
        return 0  # ids are no sequences: writing the record will fail later


def _chain(body: bytes, key: bytes) -> str:
    return _hash(body, key, b"penstock chain")


class _RotatingFile:
    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._fd: int | None = None
        self._size = 0
        self._open()
        self.mark = self._find_mark()

    def append(self, line: bytes) -> None:
        """Write a whole line, or nothing. Raise `OSError`; a later call may succeed."""
        fd = self._open()
        if self._size and self._size + len(line) > self._max_bytes:
            fd = self._rotate()
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            # A full disk may have taken part of the line. If it stays, it is a damaged line.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._size)
            self._shut()
            raise
        self._size += len(line)

    def close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)
        self._shut()

    def _shut(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _check_place(self, fd: int) -> None:
        """Raise `OSError`, with advice, if the file at the path is no longer the open one."""
        opened = os.fstat(fd)
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            what = "was removed"
        else:
            if (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino):
                return
            what = "is another file now"
        copied = f"cp -p /proc/{os.getpid()}/fd/{fd} {shlex.quote(str(self.path))}"
        raise OSError(
            f"the file {what} while it is written to; before a restart put back what is open, or "
            f"it is lost: {copied}"
        )

    def _open(self) -> int:
        if self._fd is not None:
            self._check_place(self._fd)
            return self._fd
        fd = _open_private(self.path)
        try:
            _claim(fd, self.path)
            self._size = os.fstat(fd).st_size
            if self._size and os.pread(fd, 1, self._size - 1) != b"\n":
                self._size += os.write(fd, b"\n")
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        return fd

    def _rotate(self) -> int:
        for number in range(self._keep - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._older(number), self._older(number + 1))
        os.replace(self.path, self._older(1))
        self._shut()
        return self._open()

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _find_mark(self) -> tuple[int, str]:
        """Return the log's last sequence and chain; a new file continues the previous one."""
        if self._size:
            mark = _last_mark(self._open(), self._size)
            if mark is None:
                self._shut()
                raise OSError(f"audit log {self.path}: the file there is no audit log")
            return mark
        with contextlib.suppress(OSError), self._older(1).open("rb") as before:
            size = os.fstat(before.fileno()).st_size
            return _last_mark(before.fileno(), size) or (0, _NO_CHAIN)
        return 0, _NO_CHAIN


def _open_private(path: Path) -> int:
    """Open a file that is not a link, or create it; return its descriptor. Raise `OSError`."""
    # Neither hang on a FIFO nor follow a link.
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise OSError(f"audit log {path}: {error.strerror}") from None
    else:
        os.fchmod(fd, 0o600)  # overrides the umask
        return fd
    try:
        return os.open(path, flags)
    except OSError as error:
        # O_NOFOLLOW's error for a link.
        reason = "is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise OSError(f"audit log {path}: {reason}") from None


def _claim(fd: int, path: Path) -> None:
    """Check that the file is ours alone. Raise `OSError` that says what is wrong."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"audit log {path}: is no regular file")
    if found.st_uid != os.geteuid():
        raise OSError(f"audit log {path}: belongs to another user (uid {found.st_uid})")
    if others := stat.S_IMODE(found.st_mode) & 0o077:
        raise OSError(
            f"audit log {path}: is open to others (mode bits {others:03o}); move it away, or "
            "chmod 600 it if what it holds may be known"
        )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        in_use = error.errno in (errno.EAGAIN, errno.EACCES)
        reason = "is written to by another log; give each its own" if in_use else error.strerror
        raise OSError(f"audit log {path}: {reason}") from None


def _last_mark(fd: int, size: int) -> tuple[int, str] | None:
    """Return sequence and chain of the last whole line, even if it is far from the end."""
    span = _TAIL_BYTES
    while True:
        lines = os.pread(fd, span, max(0, size - span)).split(b"\n")
        for line in reversed(lines):  # the first may be a part of a line, which is not parsed
            with contextlib.suppress(ValueError):
                _, entry, chain = _take_apart(line)
                return entry["sequence"], chain
        if span >= size:
            return None
        span *= 4


# ---- reading ----


def read_audit(
    path: str | os.PathLike[str], report: Callable[[str], None], *, key: bytes | None = None
) -> Iterator[AuditRecord]:
    """Yield a file's records in order, without damaged ones. Raise `OSError` if it cannot be read.

    `report` gets one line for each fault, with file and line number. Edits of a keyed log cannot be
    found without its key; this is reported once.
    """
    follow = _Follower()
    key_missing = False
    with Path(path).open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            try:
                line = _parse(raw, key)
            except ValueError as error:
                follow.damaged += 1
                report(f"{path}:{number}: {error}")
                continue
            if line.keyed and key is None and not key_missing:
                key_missing = True
                report(f"{path}:{number}: was written with a key; edits are not found without it")
            if problem := follow.problem(line):
                report(f"{path}:{number}: {problem}")
            yield line.record


@dataclass(frozen=True, slots=True)
class _Line:
    sequence: int
    previous: str
    chain: str
    keyed: bool
    record: AuditRecord


@dataclass(slots=True)
class _Follower:
    last: _Line | None = None
    # Unreadable lines after the last good one, already reported.
    damaged: int = 0

    def problem(self, line: _Line) -> str:
        """Return the fault between the last good line and this one, or ""."""
        last, damaged = self.last, self.damaged
        self.last, self.damaged = line, 0
        if last is None:
            return ""
        gap = line.sequence - last.sequence - 1
        if gap < 0:
            return f"sequence {line.sequence} after {last.sequence}: two logs in one, or moved"
        if line.previous == last.chain:
            return f"{gap} records before it were dropped by the writer" if gap else ""
        if gap > damaged:
            return f"{gap - damaged} records before it are missing: lines were taken out"
        return "" if damaged else "does not follow the line before it: one of them was replaced"


def _take_apart(line: bytes) -> tuple[bytes, dict[str, Any], str]:
    """Return the bytes that the chain hashes, their JSON, and the chain. Raise `ValueError`."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError("is no line of an audit log, or not all of one")
    body = match[1] + b"}"
    try:
        entry = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    for name, wanted in (("version", int), ("sequence", int), ("previous", str), ("keyed", bool)):
        require(wanted, entry.get(name), name)
    return body, entry, match[2].decode()


def _parse(raw: bytes, key: bytes | None) -> _Line:
    """Parse a line and check it, without other lines. Raise `ValueError` that says what is
    wrong.
    """
    if not raw.endswith(b"\n"):
        raise ValueError("is cut off")
    body, entry, chain = _take_apart(raw[:-1])
    keyed = entry["keyed"]
    if key is not None and not keyed:
        raise ValueError("was written without a key")
    if (key is not None or not keyed) and chain != _chain(body, key or b""):
        raise ValueError("was edited" if key is None else "was edited, or has another key")
    if entry["version"] != VERSION:
        raise ValueError(f"has version {entry['version']}; only {VERSION} is known here")
    record = from_plain(AuditRecord, entry.get("record"), "record")
    return _Line(entry["sequence"], entry["previous"], chain, keyed, record)
