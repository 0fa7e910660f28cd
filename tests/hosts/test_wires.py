"""Hosts of their own are hosts: what happens on the wires between them is the kernels' to mend."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hosts.network import Host, HostsUnavailable, Network, network
from support.budget import seeded

_PORT = 7
_LENGTH = 2_000_000


@pytest.fixture
def hosts() -> Iterator[Network]:
    try:
        with network(seeded("wires").getrandbits(32), "one", "other", spare="spare") as made:
            yield made
    except HostsUnavailable as error:
        pytest.skip(str(error))


def _echo(host: Host, address: str = "0.0.0.0") -> None:
    """Serve one connection on a host: all that comes goes back."""
    server = host.run(socket.create_server, (address, _PORT))

    def serve() -> None:
        # Its host may go first.
        with contextlib.suppress(OSError), server, server.accept()[0] as connection:
            while data := connection.recv(65536):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()


def _connect(hosts: Network) -> socket.socket:
    _echo(hosts.hosts["other"])
    address = (hosts.hosts["other"].address, _PORT)
    connection = hosts.hosts["one"].run(socket.create_connection, address, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _round_trip_s(connection: socket.socket) -> float:
    begun_s = time.monotonic()
    connection.sendall(b"x")
    assert connection.recv(1) == b"x"
    return time.monotonic() - begun_s


def test_what_is_late_on_wires_is_late_by_both_ways(hosts: Network) -> None:
    with _connect(hosts) as connection:
        before_s = min(_round_trip_s(connection) for _ in range(20))
        for wire in hosts.wires():
            wire.delay_s = 0.02
        assert 0.04 <= min(_round_trip_s(connection) for _ in range(5)) < 0.06 + before_s


def test_bytes_are_whole_and_in_order_over_wires_that_lose_frames(hosts: Network) -> None:
    sent = random.Random(1).randbytes(_LENGTH)
    with _connect(hosts) as connection:
        for wire in hosts.wires():
            wire.loss = 0.02
        writer = threading.Thread(target=connection.sendall, args=(sent,))
        writer.start()
        got = bytearray()
        while len(got) < _LENGTH:
            got += connection.recv(65536)
        writer.join()
    assert got == sent
    assert sum(wire.num_losses for wire in hosts.wires()) > 0


@pytest.mark.parametrize("way", [("one", "other"), ("other", "one")], ids=["there", "back"])
def test_a_connection_outlives_a_cut_of_one_direction(hosts: Network, way: tuple[str, str]) -> None:
    with _connect(hosts) as connection:
        _round_trip_s(connection)
        (wire,) = hosts.wires(*way)
        wire.down = True
        connection.sendall(b"x")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        hosts.calm()
        connection.settimeout(10)
        assert connection.recv(1) == b"x"
        assert wire.num_losses > 0


def test_the_host_that_an_address_moves_to_resets_its_connections(hosts: Network) -> None:
    with _connect(hosts) as connection:
        _round_trip_s(connection)
        address = hosts.hosts["other"].address
        hosts.hosts["other"].drop_address()
        hosts.hosts["spare"].take(address)
        connection.settimeout(10)
        with pytest.raises(ConnectionResetError):
            _round_trip_s(connection)


def test_hosts_reach_nobody_but_each_other(hosts: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        one = hosts.hosts["one"]
        for address in ("127.0.0.1", "192.0.2.1"):
            with pytest.raises(OSError, match=r"refused|unreachable"):
                one.run(socket.create_connection, (address, port), 10)
