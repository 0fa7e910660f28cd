"""Ends the vLLM workers of all machines of a model if one machine is gone.

Each other machine holds a silent connection to machine 0. When it ends, both sides know. Otherwise
vLLM's workers would wait forever.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


def listening_port(master_port: int) -> int:
    """Return machine 0's port, the next after vLLM's own."""
    return master_port + 1


def await_losses(port: int, on_lost: Callable[[str], None]) -> socket.socket:
    """Accept connections at machine 0 from now on. Another thread calls `on_lost` with the address
    of a machine that is gone. Raises OSError if the port is taken.
    """
    listener = socket.create_server(("", port))

    def watch(connection: socket.socket, address: str) -> None:
        _wait_for_end(connection)
        on_lost(address)

    def accept() -> None:
        while True:
            try:
                connection, (address, *_) = listener.accept()
            except OSError:
                return
            logger.info("machine %s is there", address)
            threading.Thread(target=watch, args=(connection, address), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


def hold_connection(host: str, port: int, on_lost: Callable[[], None]) -> None:
    """Wait until machine 0 accepts a connection. Another thread calls `on_lost` when the machine is
    gone.
    """
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_RETRY_S)
            break
        except OSError:
            time.sleep(_RETRY_S)
    connection.settimeout(None)

    def watch() -> None:
        _wait_for_end(connection)
        on_lost()

    threading.Thread(target=watch, daemon=True).start()


def _wait_for_end(connection: socket.socket) -> None:
    # A machine without power sends nothing; it counts as gone after 30 s.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    with connection:
        try:
            while connection.recv(64):
                continue
        except OSError:
            return
