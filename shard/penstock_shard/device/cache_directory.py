"""Directories of compiled kernels, kept loads and what a shard remembers: ones that nobody else
can write to or replace. And what names in them are made of.

Environment: PENSTOCK_CACHE (default $XDG_CACHE_HOME/penstock or ~/.cache/penstock), and
PENSTOCK_LOAD_CACHE for kept loads (default `loads` in that), as kernels may come with an image.
PENSTOCK_STATE (default $XDG_STATE_HOME/penstock or ~/.local/state/penstock) for what a shard's next
start finds again: nothing makes that anew, as it does what is in caches.
PENSTOCK_TRUSTED_DIRECTORIES (separated as in PATH) names directories above a cache that others may
write to, but who are trusted: as a volume of a container is, where there are no other users.
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

# The outermost package, however deep this module is within.
_PACKAGE = Path(__file__).parents[__name__.count(".") - 1]
# As many as Linux follows.
_MOST_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LIBRARIES = ("torch", "transformers", "safetensors", "gguf")


def cache_directory() -> Path:
    """The directory, which may not be there yet."""
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "penstock"
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError:
        # The user has no home directory, as in some containers.
        return temporary_directory()


def load_directory() -> Path:
    """The directory of kept loads; it may not be there yet."""
    chosen = os.environ.get("PENSTOCK_LOAD_CACHE")
    return Path(chosen) if chosen else cache_directory() / "loads"


def state_directory() -> Path:
    """The directory of what a shard remembers from one start to the next; it may not be there yet.
    Raises OSError for a user without a home directory, as there are in containers.
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
    """A directory for as long as the process runs."""
    directory = tempfile.mkdtemp(prefix="penstock-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def ensure_safe(path: Path) -> bool:
    """Tell whether a file of the cache is there; makes its directory. Raises OSError where that
    cannot be used, or others may write to it, to the file, or to what leads there: they would run
    code as our user.
    """
    ensure_safe_directory(path.parent)
    if not path.exists():
        return False
    _check_way(path)
    return True


def ensure_safe_directory(path: Path) -> None:
    """Make a directory of our own. Raises OSError where it cannot be used, or others may write to
    it or put another in its place.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_way(path)


def _check_way(path: Path) -> None:
    """Raises PermissionError for what others may write to: the path, or a directory or link on the
    way to it, by which they could put something else in its place.
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
    """List all that the system looks at to find a path, from the root on, links one by one."""
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
    # In a sticky one only owners replace what is theirs, as in /tmp.
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    # A group of the user's own name and number has no other members.
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
    """Give a file that was written beside its place its name. It is on disk before that, or a crash
    could leave an empty one.
    """
    with made.open("rb") as file:
        os.fsync(file.fileno())
    made.replace(path)


def file_identity(path: Path) -> str:
    """The system's account of a file, which changes when its content does."""
    status = path.stat()
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def code_hash() -> str:
    """A hash of our code and the versions of libraries: what is kept has the layout of their
    objects.
    """
    total = hashlib.blake2b(platform.python_version().encode(), digest_size=16)
    for path in sorted(_PACKAGE.rglob("*.py")):
        total.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes())
    for name in _LIBRARIES:
        total.update(f"{name} {importlib.metadata.version(name)}\0".encode())
    return total.hexdigest()
