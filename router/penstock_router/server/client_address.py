"""Identifies a client by its address."""

from __future__ import annotations

import ipaddress


def network_of(address: str) -> str:
    """Return the address; for IPv6 its /64 network, because one machine may use all addresses in
    it.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        # A Unix socket has no address.
        return ""
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))
