"""Where images may be fetched: domains by name, and then the addresses that they lead to."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from penstock_client.fleet.allowed_networks import Ip, Network, check_unicast, plain_address

# All IPv6 addresses of the internet; what lies outside is of one site, of one machine, or reserved.
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")


def is_allowed_domain(host: str, domains: Sequence[str]) -> bool:
    """Whether a host, in lower case and as ASCII, is one of the domains; *.example.com has all
    below example.com, but not itself.
    """
    return any(
        host.endswith(domain[1:]) if domain.startswith("*.") else host == domain
        for domain in domains
    )


def is_allowed_address(address: str, networks: Sequence[Network]) -> bool:
    """Whether images may be fetched from an IP address: one of the internet, or of `networks`, but
    never link-local ones, clouds' metadata services and the like.
    """
    try:
        # Without an interface's name, as in fe80::1%eth0.
        ip = ipaddress.ip_address(address.partition("%")[0])
        check_unicast(ip)
    except ValueError:
        return False
    plain = plain_address(ip)
    return any(plain in network for network in networks) or _is_of_the_internet(plain)


def _is_of_the_internet(ip: Ip) -> bool:
    is_global = ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_private)
    return is_global and (ip.version == 4 or ip in _GLOBAL_IPV6)
