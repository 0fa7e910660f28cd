"""A server that answers whatever it is sent with given bytes."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def http_stub(
    *answers: bytes, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> Iterator[int]:
    """Yield a server's port. Each connection gets the next answer; the last one is repeated."""
    left = list(answers)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            # The first bytes of a TLS client have no lines.
            is_tls = self.request.recv(1, socket.MSG_PEEK) == b"\x16" if tls is None else False
            while not is_tls and (line := self.rfile.readline().strip().lower()):
                length = int(line.partition(b":")[2]) if b"content-length" in line else length
            # Read all of it: closing a socket with unread bytes resets the connection.
            self.rfile.read(length)
            self.wfile.write(left.pop(0) if len(left) > 1 else left[0])

    class Server(socketserver.TCPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def get_request(self) -> tuple[socket.socket, object]:
            plain, address = super().get_request()
            # After an error of the handshake, socketserver closes the connection and serves on.
            return (plain if tls is None else tls.wrap_socket(plain, server_side=True)), address

    with Server((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
