"""Starts this machine's ranks. Imports no torch."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass

from penstock_common.child_environment import HUB, child_environment
from penstock_shard.config import ShardConfig


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The rank of a process, and its place on its machine."""

    rank: int
    # Ranks in the group.
    size: int
    device_index: int
    # Ranks on the machine.
    num_beside: int

    @property
    def is_elsewhere(self) -> bool:
        """True if the rank is not on rank 0's machine."""
        return self.rank >= self.num_beside


def local_ranks(config: ShardConfig) -> list[RankSpec]:
    """Return the ranks of this machine, which may include rank 0."""
    size = config.tensor_parallel_size
    count = size // config.nnodes
    first = config.node_rank * count
    return [RankSpec(first + index, size, index, count) for index in range(count)]


def listen(config: ShardConfig) -> socket.socket:
    """Open the socket on which rank 0 accepts the others. Raises OSError if it cannot be bound."""
    if config.nnodes == 1:
        return socket.create_server(("127.0.0.1", 0))
    return socket.create_server(("", config.master_port), backlog=config.tensor_parallel_size)


def start_rank(place: RankSpec, address: str, port: int) -> subprocess.Popen[bytes]:
    """Start a rank other than 0, which connects to rank 0 at `address`:`port`."""
    numbers = (port, place.rank, place.size, place.device_index, place.num_beside)
    # A rank on another machine downloads the model there.
    needed = HUB if place.is_elsewhere else ()
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "penstock_shard.model_loader.rank_main",
            address,
            *map(str, numbers),
        ],
        stdin=subprocess.DEVNULL,
        env={"OMP_WAIT_POLICY": "PASSIVE", **child_environment(*needed)},
    )
