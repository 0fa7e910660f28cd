"""Tells the client that an address belongs to."""

from __future__ import annotations

import ipaddress


def network_of(address: str) -> str:
    """The address; of IPv6 the network of 64 bits, all of which one machine may use."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        # Over a Unix socket: there are no addresses.
        return ""
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))
