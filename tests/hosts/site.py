"""Clients, a router and shards, each on a host of its own."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hosts.network import Network, network
from hosts.readers import READERS, Reading, read
from support.processes import Router, Shard, wait_until

_PORT = 20051
_ADMIN_KEY = "an-admin"
# Answers have about 80 tokens: they take three seconds.
_SHARD_FLAGS = ("--host", "0.0.0.0", "--step-ms", "40", "--max-num-batched-tokens", "512")


class Site:
    """Hosts `clients`, `router`, `one` and `other`, and `spare`: its shard has no address yet."""

    def __init__(self, hosts: Network, folder: Path, seed: int, stall_timeout_s: float) -> None:
        self.network = hosts
        self.addresses = [self._address(name) for name in ("one", "other")]
        self.seed = seed
        self._stall_timeout_s = stall_timeout_s
        self._folder = folder
        self._closing = ExitStack()
        self._num_shards = 0
        self._shards: dict[str, Shard] = {}

    def start(self) -> None:
        """Start everything; `close` ends it."""
        for name in ("one", "other", "spare"):
            self._start_shard(name)
        host = self.network.hosts["router"]
        flags = ("--host", host.address, "--stall-timeout-s", str(self._stall_timeout_s))
        keys = ("--admin-key", _ADMIN_KEY, "--resume-key", "a-key")
        self.router = host.run(Router, self._folder / "router", self.addresses, *flags, *keys)
        self._closing.callback(self.router.close)
        port = self.router.address.rpartition(":")[2]
        self.router.url = f"http://{host.address}:{port}"
        host.run(self.router.wait_healthy)
        self.wait_ready()

    def close(self) -> None:
        self._closing.close()

    # ---- troubles ----

    def cut(self, sender: str = "", receiver: str = "") -> None:
        """Let nothing through from one host, or to one."""
        for wire in self.network.wires(sender, receiver):
            wire.down = True

    def cut_off(self, *names: str) -> None:
        """Let nothing through from these hosts nor to them."""
        for name in names:
            self.cut(sender=name)
            self.cut(receiver=name)

    def power_off(self, name: str) -> None:
        """No FIN and no RST leaves it."""
        self.cut_off(name)
        self._shards[name].close()

    def power_on(self, name: str) -> None:
        """Start a new shard on the host, and calm the network."""
        self._start_shard(name)
        self.network.calm()

    def move(self, name: str) -> None:
        """Another host has this one's address now, with its own shard; they trade names too."""
        hosts, shards = self.network.hosts, self._shards
        hosts[name].drop_address()
        hosts["spare"].take(hosts[name].address)
        hosts[name], hosts["spare"] = hosts["spare"], hosts[name]
        shards[name], shards["spare"] = shards["spare"], shards[name]

    # ---- what is seen of it ----

    def read(self, for_s: float) -> Future[list[Reading]]:
        """Let the clients begin answers for `for_s` seconds, and return the future of what they
        read. It is done when the last of these answers is.
        """
        host, url = self.network.hosts["clients"], self.router.url
        # A process each time: gRPC keeps to the event loop that it met first.
        pool = host.run(ProcessPoolExecutor, 1, multiprocessing.get_context("spawn"))
        reading = host.run(pool.submit, read, url, self.addresses, self.seed, for_s)
        host.run(pool.shutdown, wait=False)
        return reading

    def num_continued(self) -> int:
        """Return how many times a request of the router went on at another shard."""
        _, text = self.network.hosts["router"].run(self.router.ask, "/metrics")
        found = re.findall(r'fleet_events_total\{event="continued".*\} (\S+)', text)
        return int(sum(map(float, found)))

    def wait_ready(self) -> float:
        """Wait until the router can use both shards; return how long that took."""
        return wait_until(
            lambda: all(shard["ready"] for shard in self._states()),
            timeout_s=60,
            what=f"both shards ready; the router's log:\n{self.router.log}",
        )

    def wait_busy(self) -> None:
        """Wait until the shards have more than half of the readers' requests."""

        def busy() -> bool:
            in_flight = sum(int(shard["in_flight_from_here"]) for shard in self._states())
            return in_flight > READERS // 2

        wait_until(busy, timeout_s=60, what="requests on the shards")

    def _states(self) -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {_ADMIN_KEY}"}
        router = self.network.hosts["router"]
        _, text = router.run(self.router.ask, "/admin/shards", headers=headers)
        shards: list[dict[str, Any]] = json.loads(text)["shards"]
        return shards

    def _address(self, name: str) -> str:
        return f"{self.network.hosts[name].address}:{_PORT}"

    def _start_shard(self, name: str) -> None:
        self._num_shards += 1
        log = self._folder / f"shard{self._num_shards}"
        shard = self.network.hosts[name].run(Shard, log, *_SHARD_FLAGS, port=_PORT)
        self._closing.callback(shard.close)
        self._shards[name] = shard


@contextmanager
def site(folder: Path, seed: int, stall_timeout_s: float) -> Iterator[Site]:
    """Yield a site that is ready. Raises `HostsUnavailable`."""
    with network(seed, "clients", "router", "one", "other", spare="spare") as hosts:
        made = Site(hosts, folder, seed, stall_timeout_s)
        try:
            made.start()
            yield made
        finally:
            made.close()
