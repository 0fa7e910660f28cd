"""The hosts that images may be fetched from, and the addresses that their names lead to."""

from __future__ import annotations

import ipaddress
import random

import pytest

from penstock_router.images.web_addresses import is_allowed_address, is_allowed_domain

NETWORK = ipaddress.ip_network


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("a.example", True),
        ("x.a.example", False),
        ("b.example", False),
        ("x.b.example", True),
        ("y.x.b.example", True),
        ("xb.example", False),
        (".b.example", True),
        ("a.example.", False),
        ("a.example.org", False),
        ("192.0.2.1", True),
        ("", False),
    ],
)
def test_a_host_is_allowed_by_its_whole_name_or_what_it_is_below(
    host: str, is_allowed: bool
) -> None:
    domains = ("a.example", "*.b.example", "192.0.2.1")
    assert is_allowed_domain(host, domains) is is_allowed
    assert not is_allowed_domain(host, ())


PUBLIC = (
    *("8.8.8.8", "1.1.1.1", "93.184.216.34", "172.15.0.1", "172.32.0.1", "100.63.255.255"),
    *("2606:4700::1111", "2a00:1450::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1"),
)
PRIVATE = ("10.0.0.1", "127.0.0.1", "192.168.1.1", "172.16.0.1", "100.64.0.1", "fd00::1", "::1")
NEVER = (
    *("169.254.169.254", "fe80::1", "fe80::1%eth0", "224.0.0.1", "ff02::1", "0.0.0.0", "::"),
    *("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "255.255.255.255", "240.0.0.1"),
    *("::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "2002:a9fe:a9fe::1"),
    *("image.example", "", "8.8.8", "0x8.8.8.8"),
)


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_allowed(address: str) -> None:
    assert is_allowed_address(address, ())


@pytest.mark.parametrize("address", PRIVATE)
def test_private_ones_need_their_network(address: str) -> None:
    assert not is_allowed_address(address, ())
    assert not is_allowed_address(address, (NETWORK("192.0.2.0/24"),))
    assert is_allowed_address(address, (NETWORK("0.0.0.0/0"), NETWORK("::/0")))


@pytest.mark.parametrize("address", NEVER)
def test_some_are_never_allowed(address: str) -> None:
    assert not is_allowed_address(address, (NETWORK("0.0.0.0/0"), NETWORK("::/0")))


@pytest.mark.parametrize(
    "network",
    [
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    ],
)
def test_no_form_of_an_address_that_is_not_public_is_allowed(network: str) -> None:
    inside = ipaddress.IPv4Network(network)
    rng = random.Random(network)
    for _ in range(50):
        number = rng.randrange(int(inside[0]), int(inside[-1]) + 1)
        forms = (
            ipaddress.IPv4Address(number),
            # Mapped, NAT64, 6to4, compatible, translated.
            *(
                ipaddress.IPv6Address(number + (prefix << 32))
                for prefix in (0xFFFF, 0, 0xFFFF << 16)
            ),
            ipaddress.IPv6Address(number + (0x64FF9B << 96)),
            ipaddress.IPv6Address((0x2002 << 112) + (number << 80) + 1),
        )
        assert not any(is_allowed_address(str(form), ()) for form in forms)
