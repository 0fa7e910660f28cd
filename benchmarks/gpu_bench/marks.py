"""Processes that a part started, at whatever remove: a variable of their environment says whose
they are. Engines have sessions of their own, and what a part leaves behind has no parent any more.

    python marks.py MARK FOLDER

is a process that outlives a run: it waits until its standard input is closed, which the system does
for a run that was killed too; then it ends what is left of the run, and removes its folder. Needs
nothing but Python, and Linux.
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

# Shards pass on to their children what begins like a variable of Python's.
VARIABLE = "PYTHON_GPU_PART"
_PATIENCE_S = 10.0
_POLL_S = 0.05
# Waited for at the end of a run.
_LAST_S = 1.0


def marked(mark: str) -> list[int]:
    """List the processes with this mark or one below it, as a run's is above those of its parts."""
    return [
        int(place.name)
        for place in Path("/proc").iterdir()
        if place.name.isdigit() and _is_below(_mark_of(place), mark)
    ]


def _mark_of(place: Path) -> str:
    """Read a process's mark; empty where it has none, has ended, or is somebody else's."""
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
    """Kill all processes with this mark, and those that they start meanwhile. A device's driver may
    keep one for a while.
    """
    until_s = time.monotonic() + min(within_s, _PATIENCE_S)
    while marked(mark) and time.monotonic() < until_s:
        tell_all(mark, signal.SIGKILL)
        time.sleep(_POLL_S)


@contextlib.contextmanager
def watched(mark: str, folder: Path) -> Iterator[None]:
    """Have everything with this mark ended and the folder removed when this scope ends, also if the
    process is killed before.
    """
    command = [sys.executable, __file__, mark, str(folder)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        # It goes on by itself.
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(_LAST_S)


if __name__ == "__main__":
    sys.stdin.read()
    end_all(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
