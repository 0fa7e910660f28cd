"""Finds the process that has a port, to explain why listening on it failed.

Linux shows it in /proc, if this user may inspect it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

# Columns of /proc/net/tcp and tcp6: the local address, with a port in hex, and the socket's inode.
_LOCAL, _INODE = 1, 9
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def why_not(error: OSError, port: int) -> str:
    """Return the system's reason, and the port's holder if known."""
    reason = error.strerror or str(error)
    holder = holder_of(port) if error.errno == errno.EADDRINUSE else ""
    return f"{reason} by {holder}" if holder else reason


def holder_of(port: int) -> str:
    """Return the process that listens on the port or has a connection from it, such as "nginx
    (process 4711)"; "" if unknown.
    """
    sockets = set(_sockets(port))
    if sockets:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            # The process may have ended, or belong to another user.
            with contextlib.suppress(OSError):
                if not sockets.isdisjoint(_open_files(pid)):
                    return f"{_name(pid)} (process {pid})"
    return ""


def _sockets(port: int) -> Iterator[str]:
    """Yield the sockets with this local port, named as in /proc/PID/fd."""
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines, "")
            for columns in map(str.split, lines):
                if int(columns[_LOCAL].rpartition(":")[2], 16) == port:
                    yield f"socket:[{columns[_INODE]}]"


def _open_files(pid: str) -> Iterator[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def _name(pid: str) -> str:
    """Return the program's name, and for Python the module. Other arguments may be secret."""
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
        name = comm.read().strip()
    with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as command:
        _, *arguments = command.read().split("\0")
    if arguments[:1] == ["-m"]:
        name = " ".join([name, *arguments[:2]])
    return "".join(char for char in name if char.isprintable())
