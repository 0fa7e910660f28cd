"""IP addresses that may be shards, and where names lead. A stub resolves names; nothing is sent."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

import pytest

from penstock_client.fleet import allowed_networks
from penstock_client.fleet.allowed_networks import (
    PRIVATE_NETWORKS,
    AddressInfo,
    check_unicast,
    is_loopback,
    locate,
    parse_network,
)

EVERYWHERE = (parse_network("0.0.0.0/0"), parse_network("::/0"))


def _resolver(*ips: str) -> allowed_networks.Resolve:
    async def resolve(name: str, port: int) -> list[AddressInfo]:
        return [
            (socket.AF_INET6 if ":" in ip else socket.AF_INET, 1, 6, "", (ip, port)) for ip in ips
        ]

    return resolve


NEVER = [
    *("169.254.169.254", "169.254.0.1", "fe80::1", "::ffff:169.254.169.254", "fd00:ec2::254"),
    *("fd00:ec2::23", "fd00:ec2::1:0", "fd20:ce::254", "fd20:ce::1"),
    *("64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "168.63.129.16", "100.100.100.200"),
    *("0.0.0.0", "0.1.2.3", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1"),
]


@pytest.mark.parametrize("ip", NEVER)
async def test_no_network_allows_addresses_where_no_shard_is(ip: str) -> None:
    with pytest.raises(ValueError, match="no shard is there"):
        check_unicast(ip_address(ip))
    literal = f"[{ip}]:1" if ":" in ip else f"{ip}:1"
    with pytest.raises(ValueError, match="no shard is there"):
        await locate(literal, EVERYWHERE)
    # One of several is enough.
    with pytest.raises(ValueError, match="no shard is there"):
        await locate("name.example:1", EVERYWHERE, _resolver("10.0.0.1", ip))


async def test_an_interface_in_an_answer_hides_nothing() -> None:
    with pytest.raises(ValueError, match="link-local"):
        await locate("name.example:1", EVERYWHERE, _resolver("fe80::1%eth0"))


@pytest.mark.parametrize(
    ("ip", "inside"),
    [
        *(("127.0.0.1", True), ("10.1.2.3", True), ("172.31.0.1", True), ("192.168.0.9", True)),
        *(("100.64.0.1", True), ("::1", True), ("fd12::1", True), ("::ffff:10.0.0.1", True)),
        *(("8.8.8.8", False), ("172.32.0.1", False), ("2001:db8::1", False)),
        ("::ffff:8.8.8.8", False),
    ],
)
async def test_without_a_list_this_machine_and_private_networks_are_allowed(
    ip: str, inside: bool
) -> None:
    located = locate("name.example:1", PRIVATE_NETWORKS, _resolver(ip))
    literal = locate(f"[{ip}]:1" if ":" in ip else f"{ip}:1", PRIVATE_NETWORKS)
    if inside:
        assert await located == [ip_address(ip)]
        assert await literal == []
        return
    with pytest.raises(ValueError, match=r"name\.example:1 leads to .* --shard-networks"):
        await located
    with pytest.raises(ValueError, match="outside of --shard-networks"):
        await literal


async def test_a_list_replaces_what_is_allowed_without_it() -> None:
    only = (parse_network("203.0.113.0/24"),)
    assert await locate("203.0.113.9:1", only) == []
    with pytest.raises(ValueError, match=r"10\.0\.0\.1, .* \(203\.0\.113\.0/24\)"):
        await locate("10.0.0.1:1", only)


async def test_a_name_that_cannot_be_resolved_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(name: str, port: int) -> list[AddressInfo]:
        raise socket.gaierror(-2, "Name or service not known")

    async def hangs(name: str, port: int) -> list[AddressInfo]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(allowed_networks, "_RESOLVE_S", 0.01)
    for resolve, words in ((fails, "Name or service not known"), (hangs, "0.01 s")):
        with pytest.raises(ValueError, match=words):
            await locate("name.example:1", PRIVATE_NETWORKS, resolve)
    with pytest.raises(ValueError, match="has no address"):
        await locate("name.example:1", PRIVATE_NETWORKS, _resolver())


@pytest.mark.parametrize("text", ["10.0.0.1/8", "10.0.0.0/33", "everywhere", ""])
def test_what_is_no_network_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="is no network such as"):
        parse_network(text)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        *(("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True)),
        *(("10.0.0.1:1", False), ("localhost.example:1", False), ("name:1", False)),
    ],
)
def test_only_this_machine_is_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
