"""Finds all processes that a part started, directly or not, by a variable of their environment.
Engines have their own sessions, and processes that a part leaves have lost their parent.

python marks.py MARK FOLDER

outlives a run: it waits until its standard input is closed, which the system also does if a run is
killed; then it ends the run's other processes, and removes its folder. Needs only Python and Linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Shards pass variables that begin with PYTHON to their children.
VARIABLE = "PYTHON_GPU_PART"
_PATIENCE_S = 10.0
_POLL_S = 0.05
# Wait this long for the watcher at the end of a run.
_LAST_S = 1.0


def marked(mark: str) -> list[int]:
    """List processes with this mark or one below it. A run's mark is above those of its parts."""
    return [
        int(place.name)
        for place in Path("/proc").iterdir()
        if place.name.isdigit() and _is_below(_mark_of(place), mark)
    ]


def _mark_of(place: Path) -> str:
    """Read a process's mark; empty if it has none, has ended, or belongs to another user."""
    try:
        variables = (place / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    start = f"{VARIABLE}=".encode()
    found = [variable.removeprefix(start) for variable in variables if variable.startswith(start)]
    return os.fsdecode(found[0]) if found else ""


def _is_below(found: str, mark: str) -> bool:
    return found == mark or found.startswith(f"{mark}/")


def tell_all(mark: str, number: signal.Signals) -> None:
    """Send a signal to each process with this mark."""
    for process in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def end_all(mark: str, within_s: float = _PATIENCE_S) -> None:
    """Kill all processes with this mark, also those that they start meanwhile. A device's driver
    may delay their end.
    """
    until_s = time.monotonic() + min(within_s, _PATIENCE_S)
    while marked(mark) and time.monotonic() < until_s:
        tell_all(mark, signal.SIGKILL)
        time.sleep(_POLL_S)


@contextlib.contextmanager
def watched(mark: str, folder: Path) -> Iterator[None]:
    """End everything with this mark and remove the folder at the end of the context, even if this
    process is killed.
    """
    command = [sys.executable, __file__, mark, str(folder)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        # The watcher continues by itself.
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(_LAST_S)


if __name__ == "__main__":
    sys.stdin.read()
    end_all(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
