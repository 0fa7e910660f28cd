"""Which process has a port of this machine: for the line that says why it cannot be listened on.

Linux tells it in /proc, of processes that this user may look into; elsewhere nothing is known.
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
    """Why listening on the port failed, in the system's words, and who has it if that is known."""
    reason = error.strerror or str(error)
    holder = holder_of(port) if error.errno == errno.EADDRINUSE else ""
    return f"{reason} by {holder}" if holder else reason


def holder_of(port: int) -> str:
    """Such as "nginx (process 4711)", also if it only has a connection from there; "" if that
    cannot be known.
    """
    sockets = set(_sockets(port))
    if sockets:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            # It may have ended by now, or be another user's.
            with contextlib.suppress(OSError):
                if not sockets.isdisjoint(_open_files(pid)):
                    return f"{_name(pid)} (process {pid})"
    return ""


def _sockets(port: int) -> Iterator[str]:
    """The sockets with this local port, as links in /proc/PID/fd name them."""
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
    """Its program, and of Python the module: other arguments may be secret."""
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
        name = comm.read().strip()
    with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as command:
        _, *arguments = command.read().split("\0")
    if arguments[:1] == ["-m"]:
        name = " ".join([name, *arguments[:2]])
    return "".join(char for char in name if char.isprintable())
