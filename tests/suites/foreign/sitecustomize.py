"""A block on connections to other machines, in every process of another project's tests.

Python imports this module at its start.
"""

import sys
from typing import Any

_HERE = ("127.0.0.1", "::1", "localhost", "0.0.0.0")


def _only_here(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        if arguments[1][0] not in _HERE:
            raise OSError(f"not on this machine: {arguments[1][0]}")
    elif event == "socket.getaddrinfo" and arguments[0] not in (*_HERE, None):
        raise OSError(f"not on this machine: {arguments[0]}")


sys.addaudithook(_only_here)
