"""A socket that listens, on the first address of a host."""

from __future__ import annotations

import socket
from ipaddress import ip_address

# The kernel's queue of connections that nobody has accepted yet.
BACKLOG = 2048


def is_for_this_machine(host: str) -> bool:
    """Tell whether whoever listens there is reached by this machine's processes alone."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower() == "localhost"
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket on the port; raises OSError, `socket.gaierror` for what is no host.

    One that is not shared listens at once: until somebody does, the system lets several bind.
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
