"""Serves metrics over HTTP, in threads: to a few callers at once, each for a few seconds.

Callers need no key.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

# More connections are closed without an answer.
_MAX_CALLERS = 8
# Time for a whole connection.
_CALLER_TIMEOUT_S = 5.0


def serve_in_threads(registry: Collector, host: str, port: int) -> None:
    """Serve the registry's metrics until the process ends.

    Raises:
        OSError: the port is in use, or the address is not this machine's.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    server = _Server(family, (str(address[0]), port))
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, family: int, address: tuple[str, int]) -> None:
        self.address_family = family
        # connection -> its arrival, by `time.monotonic`.
        self._arrived_s: dict[socket.socket, float] = {}
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._arrived_s) >= _MAX_CALLERS:
            self.shutdown_request(request)
            return
        self._arrived_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._arrived_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that exceed their time. Called twice a second."""
        late_s = time.monotonic() - _CALLER_TIMEOUT_S
        for request, arrived_s in list(self._arrived_s.items()):
            if arrived_s < late_s:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    # The connection was closed meanwhile.
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an exception, unless the caller left or sent nothing."""
        if not isinstance(sys.exc_info()[1], OSError):
            logger.exception("metrics could not be answered")
