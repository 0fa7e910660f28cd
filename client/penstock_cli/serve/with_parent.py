"""Runs another command, which gets SIGTERM when its parent process ends.

The kernel sends the signal for any end of the parent, but only on Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

# From linux/prctl.h. The setting survives exec.
_PR_SET_PDEATHSIG = 1


def with_parent(command: Sequence[str]) -> list[str]:
    """Return a command line for a child of this process. On systems other than Linux, return
    `command`.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


def main(parent_pid: int, command: list[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        print(f"penstock serve: prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    # The parent may have ended before the prctl call.
    if os.getppid() == parent_pid:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
