"""Notices that an open database's files were removed or replaced.

SQLite continues to use its open files, which are lost when the process ends.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from pathlib import Path

# The database, its write-ahead log, and the log's index.
_ENDINGS = ("", "-wal", "-shm")
_OPEN = Path("/proc/self/fd")

_Identity = tuple[int, int]


class FilesDisplaced(OSError):
    """Files were removed or replaced. The text names them; `advice` tells what to do."""

    def __init__(self, text: str, advice: str) -> None:
        super().__init__(text)
        self.advice = advice


class OpenFiles:
    def __init__(self, path: str) -> None:
        """Note the files of the open database at this absolute path. Raise `OSError`."""
        self._identities = {path + ending: _identity(path + ending) for ending in _ENDINGS}

    def check(self) -> None:
        """Compare the files by device and inode. Raise `FilesDisplaced` or `OSError`."""
        removed, replaced = [], []
        for path, identity in self._identities.items():
            try:
                if _identity(path) != identity:
                    replaced.append(path)
            except FileNotFoundError:
                removed.append(path)
        if not removed and not replaced:
            return
        told = [f"{path} was removed" for path in removed]
        told += [f"{path} is another file now" for path in replaced]
        commands = self._commands([*removed, *replaced])
        raise FilesDisplaced(
            f"{' and '.join(told)} while this router has it open, so nothing is stored",
            _advice(commands, is_replaced=bool(replaced)),
        )

    def _commands(self, displaced: Collection[str]) -> list[str]:
        """Return shell commands that copy the open files to their paths."""
        # SQLite makes the index again from the log.
        wanted = {
            self._identities[path]: path for path in displaced if not path.endswith(_ENDINGS[-1])
        }
        commands = {}
        for number in _open_numbers():
            try:
                path = wanted.get(_identity(_OPEN / number))
            except OSError:
                # The descriptor was closed meanwhile.
                continue
            if path is not None:
                copied = f"/proc/{os.getpid()}/fd/{number}"
                commands[path] = f"cp -p {copied} {shlex.quote(path)}"
        return [commands[path] for path in wanted.values() if path in commands]


def _identity(path: str | Path) -> _Identity:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _open_numbers() -> list[str]:
    """List this process's descriptors; empty if the system does not tell."""
    try:
        return os.listdir(_OPEN)
    except OSError:
        return []


def _advice(commands: Collection[str], *, is_replaced: bool) -> str:
    if not commands:
        return "restart the router"
    copy = " && ".join(commands)
    if is_replaced:
        return (
            "a restart of the router uses what is there now; unless that is a copy of what is open "
            f"here, all that was stored before is lost then, or is put back first by: {copy}"
        )
    return f"before you restart the router put back what it has open, or it is lost: {copy}"
