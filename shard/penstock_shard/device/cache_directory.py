"""Directories for compiled kernels, kept results of model loads, and a shard's state. No other user
can write to them or replace them. This module also makes parts of their files' names.

Environment:
PENSTOCK_CACHE: compiled kernels; default $XDG_CACHE_HOME/penstock or ~/.cache/penstock.
PENSTOCK_LOAD_CACHE: kept loads, separate because kernels may come with an image; default
$PENSTOCK_CACHE/loads.
PENSTOCK_STATE: state for a shard's next start, which cannot be made again; default
$XDG_STATE_HOME/penstock or ~/.local/state/penstock.
PENSTOCK_TRUSTED_DIRECTORIES: directories above a cache, separated as in PATH, that other users may
write to, such as a container's volume.
"""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The directory of the outermost package.
_PACKAGE = Path(__file__).parents[__name__.count(".") - 1]
# The largest number of symbolic links in a path, as on Linux.
_MOST_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LIBRARIES = ("torch", "transformers", "safetensors", "gguf")


def cache_directory() -> Path:
    """The directory of compiled kernels; it may not exist yet."""
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "penstock"
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError:
        # In some containers the user has no home directory.
        return temporary_directory()


def load_directory() -> Path:
    """The directory of kept model loads; it may not exist yet."""
    chosen = os.environ.get("PENSTOCK_LOAD_CACHE")
    return Path(chosen) if chosen else cache_directory() / "loads"


def state_directory() -> Path:
    """The directory of state for the next start; it may not exist yet. Raises OSError if the user
    has no home directory, as in some containers.
    """
    if chosen := os.environ.get("PENSTOCK_STATE"):
        return Path(chosen)
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "penstock"
    try:
        return Path.home() / ".local" / "state" / "penstock"
    except RuntimeError:
        raise OSError("this user has no home directory; set PENSTOCK_STATE") from None


@functools.cache
def temporary_directory() -> Path:
    """Make a directory that is deleted when the process ends."""
    directory = tempfile.mkdtemp(prefix="penstock-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def ensure_safe(path: Path) -> bool:
    """Make a cache file's directory; tell whether the file exists. Raises OSError if the directory
    cannot be used, or if others could change the file and so run code as our user.
    """
    ensure_safe_directory(path.parent)
    if not path.exists():
        return False
    _check_way(path)
    return True


def ensure_safe_directory(path: Path) -> None:
    """Make a directory that only our user can change. Raises OSError if it cannot be used, or if
    others may write to it or replace it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_way(path)


def _check_way(path: Path) -> None:
    """Raise PermissionError if others may write to a path, or to a directory or link by which they
    could replace it.
    """
    for place in _way(path):
        status = place.lstat()
        if stat.S_ISLNK(status.st_mode):
            _check_owner(place, status)
        elif not place.samefile(path):
            _check_directory_above(place, status)
        else:
            _check_alone_writes(place, status)


def _way(path: Path) -> Iterator[Path]:
    """Yield all paths that the system visits to find a path, from the root on, following links."""
    parts = list(reversed(path.absolute().parts))
    place = Path(parts.pop())
    yield place
    num_links = 0
    while parts:
        part = parts.pop()
        if part == "..":
            place = place.parent
            continue
        place /= part
        yield place
        if place.is_symlink():
            num_links += 1
            if num_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            parts += reversed(place.readlink().parts)
            place = place.parent


def _check_directory_above(place: Path, status: os.stat_result) -> None:
    if str(place) in os.environ.get("PENSTOCK_TRUSTED_DIRECTORIES", "").split(os.pathsep):
        return
    _check_owner(place, status)
    # In a sticky directory, such as /tmp, only owners can replace a file.
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    # A group with the user's own number has no other members.
    is_private = status.st_gid == os.getgid() == os.getuid()
    writers = stat.S_IWOTH if is_private else _OTHERS_WRITE
    if status.st_mode & writers and not is_sticky:
        mode = f"{stat.S_IMODE(status.st_mode):o}"
        raise PermissionError(
            f"{place} has mode {mode}; group and others must not write to it, as they could "
            "replace what is in it (or name it in PENSTOCK_TRUSTED_DIRECTORIES)"
        )


def _check_alone_writes(place: Path, status: os.stat_result) -> None:
    _check_owner(place, status)
    if status.st_mode & _OTHERS_WRITE:
        mode = f"{status.st_mode & 0o777:o}"
        raise PermissionError(f"{place} has mode {mode}; group and others must not write to it")


def _check_owner(place: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.getuid()):
        raise PermissionError(f"{place} belongs to user {status.st_uid}; it must be root's or ours")


def replace_file(made: Path, path: Path) -> None:
    """Sync a file to disk, then rename it. Without the sync, a crash could leave an empty file."""
    with made.open("rb") as file:
        os.fsync(file.fileno())
    made.replace(path)


def file_identity(path: Path) -> str:
    """Return a text that changes when the file's content does."""
    status = path.stat()
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def code_hash() -> str:
    """A hash of our code and library versions, which determine the layout of kept objects."""
    total = hashlib.blake2b(platform.python_version().encode(), digest_size=16)
    for path in sorted(_PACKAGE.rglob("*.py")):
        total.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes())
    for name in _LIBRARIES:
        total.update(f"{name} {importlib.metadata.version(name)}\0".encode())
    return total.hexdigest()
