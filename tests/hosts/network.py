"""Hosts of their own on one machine: network namespaces, and the wires between them in user space.

A host is a thread that has a network namespace to itself: what it starts and opens is on that host,
and the namespace goes with its last process, whatever became of the test. Its one interface is a
TAP device, whose other end is here: `Network` carries the frames from device to device, and each
`Wire` delays, loses or stops them. So the kernels' own ARP and TCP meet the troubles.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# A range for tests of networks, of which nothing is routed anywhere (RFC 2544).
_NETWORK = "198.18.0"
_DEVICE = "eth0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
# A frame of Ethernet is shorter.
_FRAME_BYTES = 2048
# Frames read from one device before the others have their turn.
_BURST = 32
# Within it the thread of a closed network ends.
_LOOK_S = 0.2

_libc = ctypes.CDLL(None, use_errno=True)


class HostsUnavailable(Exception):
    """Hosts cannot be made here, and why."""


class Host:
    """A network namespace with an interface."""

    def __init__(self, number: int, *, has_address: bool = True) -> None:
        """Raises `HostsUnavailable`."""
        self.number = number
        self.address = f"{_NETWORK}.{number}"
        self.device = -1
        self._thread = ThreadPoolExecutor(1, f"host{number}")
        try:
            self.run(self._enter)
        # Other systems than Linux have no `unshare`.
        except (AttributeError, OSError, subprocess.SubprocessError) as error:
            self.close()
            raise HostsUnavailable(f"hosts cannot be made here: {error}") from error
        if has_address:
            self.take(self.address)

    def run(self, call: Callable[..., T], *args: Any, **settings: Any) -> T:
        """Call it on this host. Sockets that it opens and processes that it starts stay here."""
        return self._thread.submit(call, *args, **settings).result()

    def take(self, address: str) -> None:
        """Have this address from now on, and tell the others, as after a move of it."""
        self.address = address
        # What tells them is that the device comes up (arp_notify).
        self._ip(
            f"link set {_DEVICE} down",
            f"address add {address}/24 dev {_DEVICE}",
            f"link set {_DEVICE} up",
        )

    def drop_address(self) -> None:
        self._ip(f"address flush dev {_DEVICE}")

    def close(self) -> None:
        """The namespace ends with the last process in it."""
        self._thread.shutdown()
        if self.device >= 0:
            os.close(self.device)
            self.device = -1

    def _enter(self) -> None:
        """The thread leaves for a namespace of its own."""
        if _libc.unshare(_CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "a namespace, which root may have")
        self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _IFF_TAP | _IFF_NO_PI
        fcntl.ioctl(self.device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), flags))
        for setting in ("ipv4/conf/all/arp_notify", f"ipv4/conf/{_DEVICE}/arp_notify"):
            Path("/proc/sys/net", setting).write_text("1")
        if Path("/proc/sys/net/ipv6").exists():
            Path(f"/proc/sys/net/ipv6/conf/{_DEVICE}/disable_ipv6").write_text("1")
        # The last byte of its hardware address is what the wires know it by.
        self._ip_here(
            "link set lo up", f"link set {_DEVICE} address 02:00:00:00:00:{self.number:02x}"
        )

    def _ip(self, *commands: str) -> None:
        self.run(self._ip_here, *commands)

    @staticmethod
    def _ip_here(*commands: str) -> None:
        subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


@dataclass(slots=True)
class Wire:
    """One direction between two hosts: what happens to its frames."""

    delay_s: float = 0.0
    # The share of frames that is lost.
    loss: float = 0.0
    # True if all frames are lost.
    down: bool = False
    num_frames: int = 0
    num_losses: int = 0


class Network:
    """An Ethernet of hosts; each direction between two of them is a wire."""

    def __init__(self, hosts: dict[str, Host], seed: int) -> None:
        self.hosts = hosts
        self._rng = random.Random(seed)
        self._by_number = {host.number: host for host in hosts.values()}
        self._wires = {
            (sender.number, receiver.number): Wire()
            for sender in hosts.values()
            for receiver in hosts.values()
            if sender is not receiver
        }
        # Frames under way: when they arrive, a number for their order, where, and the frame.
        self._in_flight: list[tuple[float, int, int, bytes]] = []
        self._order = count()
        self._over = False
        self._thread = threading.Thread(target=self._carry, name="network", daemon=True)
        self._thread.start()

    def wires(self, sender: str = "", receiver: str = "") -> list[Wire]:
        """Return the wires from `sender` to `receiver`. An empty name stands for any host."""
        return [
            wire
            for (a, b), wire in self._wires.items()
            if (not sender or self.hosts[sender].number == a)
            and (not receiver or self.hosts[receiver].number == b)
        ]

    def calm(self) -> None:
        """Stop all delays, losses and cuts."""
        for wire in self._wires.values():
            wire.delay_s, wire.loss, wire.down = 0.0, 0.0, False

    def close(self) -> None:
        self._over = True
        self._thread.join()

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            for host in self._by_number.values():
                selector.register(host.device, selectors.EVENT_READ, host)
            while not self._over:
                until_s = self._in_flight[0][0] - time.monotonic() if self._in_flight else _LOOK_S
                for key, _ in selector.select(max(0.0, until_s)):
                    self._take_from(key.data)
                self._deliver()

    def _take_from(self, sender: Host) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BURST):
                frame = os.read(sender.device, _FRAME_BYTES)
                for number in self._receivers(sender, frame):
                    self._send(self._wires[sender.number, number], number, frame)

    def _receivers(self, sender: Host, frame: bytes) -> list[int]:
        # Broadcasts ask who has an address.
        if frame[0] & 1:
            return [number for number in self._by_number if number != sender.number]
        return [frame[5]] if (sender.number, frame[5]) in self._wires else []

    def _send(self, wire: Wire, number: int, frame: bytes) -> None:
        wire.num_frames += 1
        if wire.down or (wire.loss and self._rng.random() < wire.loss):
            wire.num_losses += 1
            return
        at_s = time.monotonic() + wire.delay_s
        heapq.heappush(self._in_flight, (at_s, next(self._order), number, frame))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self._in_flight and self._in_flight[0][0] <= now_s:
            _, _, number, frame = heapq.heappop(self._in_flight)
            # A device that is down takes none.
            with contextlib.suppress(OSError):
                os.write(self._by_number[number].device, frame)


@contextlib.contextmanager
def network(seed: int, *names: str, spare: str = "") -> Iterator[Network]:
    """Hosts of these names on one network; `spare` is one more, without an address so far.

    Raises `HostsUnavailable`.
    """
    with contextlib.ExitStack() as closing:
        hosts: dict[str, Host] = {}
        for number, name in enumerate([*names, *([spare] if spare else [])], 1):
            hosts[name] = Host(number, has_address=name != spare)
            closing.callback(hosts[name].close)
        made = Network(hosts, seed)
        closing.callback(made.close)
        yield made
