"""A socket that listens on a host's first address."""

from __future__ import annotations

import socket
from ipaddress import ip_address

# Bound of the kernel's queue of new connections.
BACKLOG = 2048


def is_for_this_machine(host: str) -> bool:
    """True if only this machine's processes can connect to the host."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower() == "localhost"
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket on the port. Raise OSError if that fails; `socket.gaierror` for an invalid
    host.

    An unshared socket listens at once, because the system lets several sockets bind until one
    listens.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except UnicodeError:
        # Python raises this for text that cannot be a host name.
        raise socket.gaierror(socket.EAI_NONAME, "no name of a host") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if not shared:
            listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
