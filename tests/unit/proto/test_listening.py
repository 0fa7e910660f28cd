"""Addresses that only this machine can reach."""

from __future__ import annotations

import pytest

from penstock_common.listening import is_for_this_machine


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        *(
            (host, True)
            for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1")
        ),
        *((host, False) for host in ("", "0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "a.example")),
        ("::ffff:0.0.0.0", False),
    ],
)
def test_only_loopback_is_for_this_machine(host: str, is_ours: bool) -> None:
    assert is_for_this_machine(host) == is_ours
