"""Addresses of shards: which IP addresses are never one's, and which may join at run time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Any

_RESOLVE_S = 5.0

Ip = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
# One getaddrinfo answer: family, type, protocol, canonical name, (IP, port, ...).
AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]
Resolve = Callable[[str, int], Awaitable[Sequence[AddressInfo]]]

# This machine and private networks.
PRIVATE_NETWORKS: tuple[Network, ...] = tuple(
    ip_network(text)
    for text in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
        *("::1/128", "fc00::/7"),
    )
)
# Where clouds answer a machine's questions about itself, its credentials included, besides the
# link-local 169.254.169.254. Over IPv6, Amazon has several such services in one network.
_METADATA: tuple[Network, ...] = tuple(
    ip_network(text)
    for text in (
        *("100.100.100.200", "168.63.129.16", "192.0.0.192"),
        *("fd00:ec2::/32", "fd20:ce::/64"),
    )
)
# IPv6 addresses that lead to the IPv4 address in their last 32 bits.
_NAT64 = IPv6Network("64:ff9b::/96")


async def system_resolve(name: str, port: int) -> Sequence[AddressInfo]:
    """A and AAAA, as the machine resolves names; in a thread. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)


def parse_network(text: str) -> Network:
    """A network such as 10.0.0.0/8. Raises `ValueError`, one line."""
    try:
        return ip_network(text)
    except ValueError:
        raise ValueError(f"{text[:50]!r} is no network such as 10.0.0.0/8 or fd00::/8") from None


def check_unicast(ip: Ip) -> None:
    """Raises `ValueError`, one line, for an IP address that no shard has."""
    if kind := _never_a_shard(plain_address(ip)):
        raise ValueError(f"{ip} is {kind}: no shard is there")


def _never_a_shard(ip: Ip) -> str:
    if ip.is_link_local:
        return "link-local"
    if ip.is_multicast:
        return "multicast"
    if any(ip in network for network in _METADATA):
        return "a cloud's metadata service"
    if isinstance(ip, IPv4Address):
        return "unspecified" if ip in IPv4Network("0.0.0.0/8") else "reserved" * ip.is_reserved
    return "unspecified" * ip.is_unspecified


def plain_address(ip: Ip) -> Ip:
    """The IPv4 address that an IPv6 address stands for, or else the address itself."""
    if isinstance(ip, IPv6Address):
        if ip in _NAT64:
            return IPv4Address(int(ip) & 0xFFFF_FFFF)
        return ip.ipv4_mapped or ip.sixtofour or ip
    return ip


def is_loopback(address: str) -> bool:
    """Tell whether HOST:PORT is on this machine for certain."""
    ip = _ip_of(address)
    return address.startswith("localhost:") or (ip is not None and ip.is_loopback)


def _ip_of(address: str) -> Ip | None:
    try:
        return ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None


async def locate(
    address: str, networks: Sequence[Network], resolve: Resolve | None = None
) -> list[Ip]:
    """Find where the host name of HOST:PORT leads now, all of it in `networks`; nothing for an IP
    address, which is only checked.

    Raises `ValueError`, one line, if the name cannot be resolved, or no shard may be there.
    """
    literal = _ip_of(address)
    ips = [literal] if literal else await _resolved(address, resolve or system_resolve)
    for ip in ips:
        check_unicast(ip)
        if not any(plain_address(ip) in network for network in networks):
            leads_to = f"{address} leads to {ip}" if literal is None else f"{ip}"
            allowed = ", ".join(map(str, networks))
            raise ValueError(f"{leads_to}, which is outside of --shard-networks ({allowed})")
    return ips if literal is None else []


async def _resolved(address: str, resolve: Resolve) -> list[Ip]:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_RESOLVE_S):
            answers = await resolve(host, int(port))
    except TimeoutError:
        raise ValueError(f"{host}: nobody says within {_RESOLVE_S:g} s where it is") from None
    except OSError as error:
        raise ValueError(f"{host} cannot be resolved: {error.strerror or error}") from None
    # Without an interface's name, as in fe80::1%eth0.
    ips = [ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in answers]
    if not ips:
        raise ValueError(f"{host} has no address")
    return list(dict.fromkeys(ips))
