"""The file of API keys.

It has the SHA-256 of each key. A key has 256 random bits and cannot be guessed, so a slow hash or a
salt would not protect more.

    [[keys]]
    name = "alice"
    hash = "sha256:..."
    scopes = ["user"]
    expires = 2027-01-01
    requests_per_minute = 60

Entries with the same name are keys of one owner, who replaces one by the other: they have the same
permissions, but expire separately.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

SCOPES = ("user", "admin")
LIMITS = ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute")
MAX_LIMIT = 10**12
MAX_FILE_BYTES = 4 * 1024 * 1024

_SCHEME = "sha256:"
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
# Names that are safe in log lines, tables and metric labels.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_FIELDS = ("name", "hash", "scopes", "expires", *LIMITS)
_HEADER = re.compile(r"\s*\[\[\s*keys\s*\]\]\s*(#.*)?")


class KeyFileError(ValueError):
    """The text is one line: the key's name, the field, and what is wrong. Never a key or hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    name: str
    digest: bytes = field(repr=False)
    scopes: tuple[str, ...] = ("user",)
    expires: datetime.datetime | None = None
    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def hash_of(digest: bytes) -> str:
    return _SCHEME + digest.hex()


def read(path: str, workers: int = 1) -> tuple[KeyEntry, ...]:
    """Read the keys of a file, for a router of `workers` workers; blocks. Raise `KeyFileError`."""
    entries = parse(read_text(path))
    for entry in entries:
        for limit in LIMITS:
            value = getattr(entry, limit)
            if value is not None and value < workers:
                raise KeyFileError(
                    f"key {entry.name}: {limit}: {value} is below --workers {workers}, which share "
                    "it out"
                )
    return entries


def read_text(path: str) -> str:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise KeyFileError("it is not a regular file")
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(error.strerror or "it cannot be read") from None
    if len(content) > MAX_FILE_BYTES:
        raise KeyFileError(f"it is longer than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise KeyFileError(f"byte {error.start + 1} is not UTF-8 text") from None


def parse(text: str) -> tuple[KeyEntry, ...]:
    """Parse the keys of a file's text. Raise `KeyFileError`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The error may quote a name, which may be a key.
        where = str(error).rpartition("(at ")[2].rstrip(")")
        raise KeyFileError(f"not TOML: it is wrong at {where}") from None
    except ValueError:
        # The number exceeds Python's limit of digits.
        raise KeyFileError("not TOML: it has a number that is too long") from None
    except RecursionError:
        raise KeyFileError("not TOML: it is nested too deeply") from None
    unknown = sorted(document.keys() - {"keys"})
    if unknown:
        raise KeyFileError(f"{_shown(unknown[0])} is unknown; the file has [[keys]] and no more")
    tables = document.get("keys", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise KeyFileError("keys must be tables, each under a line [[keys]]")
    entries = tuple(_entry(number, table) for number, table in enumerate(tables, 1))
    _check_unique(entries)
    return entries


def _check_unique(entries: Sequence[KeyEntry]) -> None:
    by_name: dict[str, KeyEntry] = {}
    by_digest: dict[bytes, KeyEntry] = {}
    for entry in entries:
        first = by_name.setdefault(entry.name, entry)
        for right in ("scopes", *LIMITS):
            if getattr(entry, right) != getattr(first, right):
                raise KeyFileError(
                    f"key {entry.name}: {right}: must be the same in all entries of the name"
                )
        other = by_digest.setdefault(entry.digest, entry)
        if other is not entry:
            raise KeyFileError(f"key {entry.name}: hash: is that of {other.name} too")


# ---- Reading one entry -------------------------------------------------------------------------


def _entry(number: int, table: dict[str, Any]) -> KeyEntry:
    where = f"key number {number}"
    name = table.get("name")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        _wrong(where, "name", "must be 1 to 64 letters, digits and ._@-, the first no sign")
    where = f"key {name}"
    for unknown in table.keys() - set(_FIELDS):
        _wrong(where, _shown(unknown), f"is unknown; there are {', '.join(_FIELDS)}")
    given = table.get("hash")
    found = _HASH.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        # Do not repeat the value, which may be a key by mistake.
        _wrong(where, "hash", "must be sha256: and 64 hexadecimal digits, as `penstock keys` makes")
    return KeyEntry(
        name=name,
        digest=bytes.fromhex(found[1]),
        scopes=_scopes(where, table.get("scopes", ["user"])),
        expires=_expires(where, table.get("expires")),
        **{limit: _limit(where, limit, table.get(limit)) for limit in LIMITS},
    )


def _scopes(where: str, given: object) -> tuple[str, ...]:
    is_list = isinstance(given, list) and bool(given)
    if not (is_list and all(scope in SCOPES for scope in given)):  # type: ignore[attr-defined]
        _wrong(where, "scopes", 'must be a list of "user", "admin" or both')
    return tuple(scope for scope in SCOPES if scope in given)  # type: ignore[operator]


def _expires(where: str, given: object) -> datetime.datetime | None:
    if given is None:
        return None
    if isinstance(given, datetime.datetime):
        if given.tzinfo is None:
            _wrong(where, "expires", "has no time zone; add Z for UTC")
        return given
    if not isinstance(given, datetime.date):
        _wrong(where, "expires", "must be a date or a time, as 2027-01-01 or 2027-01-01T12:00:00Z")
    return datetime.datetime.combine(given, datetime.time(), datetime.UTC)


def _limit(where: str, name: str, given: object) -> int | None:
    if given is None:
        return None
    if type(given) is not int or not 1 <= given <= MAX_LIMIT:
        _wrong(where, name, f"must be a whole number from 1 to {MAX_LIMIT}")
    return given


def _wrong(where: str, name: str, rule: str) -> NoReturn:
    raise KeyFileError(f"{where}: {name}: {rule}")


def _shown(name: str) -> str:
    """Shorten a name: long enough to find it, too short for a key."""
    return repr(name if len(name) <= 23 else f"{name[:20]}...")


# ---- Writing -----------------------------------------------------------------------------------


def entry_text(entry: KeyEntry) -> str:
    lines = [
        "[[keys]]",
        f"name = {json.dumps(entry.name)}",
        f'hash = "{hash_of(entry.digest)}"',
        f"scopes = {json.dumps(entry.scopes)}",
    ]
    if entry.expires is not None:
        in_utc = entry.expires.astimezone(datetime.UTC)
        lines.append(f"expires = {in_utc:%Y-%m-%dT%H:%M:%SZ}")
    limits = ((name, getattr(entry, name)) for name in LIMITS)
    lines += [f"{name} = {value}" for name, value in limits if value is not None]
    return "\n".join([*lines, ""])


def add_entry(text: str, entry: KeyEntry, *, another: bool = False) -> str:
    """Add an entry to the file's text. With `another`, copy the scopes and limits of an existing
    entry of its name. Raise `KeyFileError` if the name exists, or with `another`, if it does not
    exist.
    """
    there = next((one for one in parse(text) if one.name == entry.name), None)
    if another and there is None:
        raise KeyFileError(f"there is no key {_shown(entry.name)} that this could be another of")
    if not another and there is not None:
        raise KeyFileError(
            f"there is a key {entry.name} already; --another makes one more of that name"
        )
    if there is not None:
        entry = dataclasses.replace(there, digest=entry.digest, expires=entry.expires)
    start = text if not text or text.endswith("\n") else text + "\n"
    whole = start + ("\n" if start else "") + entry_text(entry)
    parse(whole)
    return whole


def remove_entries(text: str, name: str, *, older: bool = False) -> str:
    """Remove a name's entries from the text; with `older`, all except the last one. Keep other
    entries' comments.

    Raise `KeyFileError` if there is no such entry, or if it must be removed by hand.
    """
    numbers = [number for number, entry in enumerate(parse(text)) if entry.name == name]
    if not numbers:
        raise KeyFileError(f"there is no key {_shown(name)}")
    if older and len(numbers) == 1:
        raise KeyFileError(f"there is one key {name} alone: none is older")
    for number in reversed(numbers[:-1] if older else numbers):
        text = _without_entry(text, number)
    return text


def _without_entry(text: str, number: int) -> str:
    entries = parse(text)
    wanted = (*entries[:number], *entries[number + 1 :])
    lines = text.splitlines(keepends=True)
    starts = [index for index, line in enumerate(lines) if _HEADER.fullmatch(line.rstrip("\n"))]
    for start, end in zip(starts, [*starts, len(lines)][1:], strict=True):
        # Comments above the next entry belong to it.
        while end > start and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
            end -= 1
        rest = "".join([*lines[:start], *lines[end:]])
        with contextlib.suppress(KeyFileError):
            if parse(rest) == wanted:
                return rest
    name = entries[number].name
    raise KeyFileError(f"key {name}: it is written in an unusual way; take it out by hand")


@contextlib.contextmanager
def locked(path: str) -> Iterator[str]:
    """Yield the file's real path, locked against our other processes. Raise `OSError` if it cannot
    be locked.
    """
    real = os.path.realpath(path)
    folder = os.open(os.path.dirname(real), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield real
    finally:
        os.close(folder)


def replace(path: str, text: str) -> None:
    """Replace the file atomically. Raise `OSError`.

    Only the owner may read a new file. An existing file keeps its owner and mode, so that a router
    of another user can still read it.
    """
    handle, temporary = tempfile.mkstemp(prefix=".keys-", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            with contextlib.suppress(FileNotFoundError):
                old = os.stat(path)
                os.fchmod(handle, stat.S_IMODE(old.st_mode))
                if (old.st_uid, old.st_gid) != (os.getuid(), os.getgid()):
                    os.fchown(handle, old.st_uid, old.st_gid)
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:  # after any failure, no file is left behind
        Path(temporary).unlink(missing_ok=True)
        raise
