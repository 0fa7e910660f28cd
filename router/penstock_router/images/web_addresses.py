"""Checks where images may be fetched: domains by name, then the addresses that they resolve to."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from penstock_client.fleet.allowed_networks import Ip, Network, check_unicast, plain_address

# All public IPv6 addresses; others belong to one site or machine, or are reserved.
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")


def is_allowed_domain(host: str, domains: Sequence[str]) -> bool:
    """Tell whether a host, in lower-case ASCII, is in the domains; *.example.com has all hosts
    below example.com, but not example.com.
    """
    return any(
        host.endswith(domain[1:]) if domain.startswith("*.") else host == domain
        for domain in domains
    )


def is_allowed_address(address: str, networks: Sequence[Network]) -> bool:
    """Tell whether images may be fetched from an IP address: a public one or one in `networks`, but
    never a link-local address or a cloud's metadata service.
    """
    try:
        # Drop an interface's name, as in fe80::1%eth0.
        ip = ipaddress.ip_address(address.partition("%")[0])
        check_unicast(ip)
    except ValueError:
        return False
    plain = plain_address(ip)
    return any(plain in network for network in networks) or _is_of_the_internet(plain)


def _is_of_the_internet(ip: Ip) -> bool:
    is_global = ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_private)
    return is_global and (ip.version == 4 or ip in _GLOBAL_IPV6)
