"""Processes of ranks on this machine: which ones, and started. Imports no torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from penstock_shard.config import ShardConfig


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which part of a model a process has, and where."""

    rank: int
    size: int
    # Of the devices of its machine.
    device_index: int
    # How many ranks share the machine.
    num_beside: int

    @property
    def is_elsewhere(self) -> bool:
        """Not on the machine of rank 0."""
        return self.rank >= self.num_beside


def places_here(config: ShardConfig) -> list[RankPlace]:
    """The ranks of this machine, in order; the first of all leads."""
    size = config.tensor_parallel_size
    count = size // config.nnodes
    first = config.node_rank * count
    return [RankPlace(first + index, size, index, count) for index in range(count)]


def listen(config: ShardConfig) -> socket.socket:
    """Where rank 0 awaits the others. Raises OSError where the port cannot be had."""
    if config.nnodes == 1:
        return socket.create_server(("127.0.0.1", 0))
    return socket.create_server(("", config.master_port), backlog=config.tensor_parallel_size)


def start_rank(place: RankPlace, address: str, port: int) -> subprocess.Popen[bytes]:
    """Start the process of a rank other than 0, which connects to that one at the address."""
    numbers = (port, place.rank, place.size, place.device_index, place.num_beside)
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    # Of no use there, and nothing that can leak where it is not.
    environment.pop("PENSTOCK_API_KEY", None)
    return subprocess.Popen(
        [sys.executable, "-m", "penstock_shard.rank_main", address, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        env=environment,
    )
