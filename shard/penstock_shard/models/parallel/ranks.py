"""Sums and gatherings of tensors over the ranks of one model.

Knows torch.distributed. Knows nothing of models.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MEET_S = timedelta(seconds=120)
# A rank that computes a long step on a slow processor is late, not gone; that it is gone is known
# by its connection.
_LATEST_S = timedelta(hours=2)


class Ranks:
    """This process among those that compute one model together."""

    def __init__(self, rank: int, size: int, *, in_order: bool = False) -> None:
        """`in_order`: sums are added up in the order of ranks, whatever the shape, so that their
        bits do not depend on what else is in a step. It moves more data than the usual way does.
        """
        self.rank = rank
        self.size = size
        self.in_order = in_order
        # What all ranks try out together once each has its part. Raises ModelError.
        self.checks: list[Callable[[], None]] = []
        self._is_apart = False

    def check(self) -> None:
        """Try out what was left for when all ranks have loaded. Raises ModelError."""
        for check in self.checks:
            check()
        self.checks.clear()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While it lasts this rank computes without the others: shapes are right, values not."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of every rank's `part`, in its place."""
        if self._is_apart or part.numel() == 0:
            return part
        if not self.in_order:
            dist.all_reduce(part)
            return part
        first, *others = self.gather(part)
        part.copy_(first)
        for other in others:
            part.add_(other)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Every rank's `part`, in their order: [size, *shape]."""
        if self._is_apart or part.numel() == 0:
            return part.unsqueeze(0).expand(self.size, *part.shape)
        everything = part.new_empty(self.size, *part.shape)
        _gather_into(everything.view(self.size * len(part), *part.shape[1:]), part.contiguous())
        return everything

    def from_first(self, values: Tensor) -> None:
        """Overwrite with what rank 0 has."""
        dist.broadcast(values, src=0)


def join(device: torch.device, rank: int, size: int, address: str, port: int) -> Ranks:
    """Meet the others: over NCCL on cuda, over gloo on cpu."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, size, is_master=False, timeout=_MEET_S
    )
    return _meet(store, device, rank, size)


class MeetingPoint:
    """Where ranks find each other, open as long as this object lives."""

    def __init__(self, size: int, *, alone: bool) -> None:
        """`alone`: all ranks are on this machine."""
        self._size = size
        # Else torch would listen on every interface.
        listener = socket.create_server(("127.0.0.1" if alone else "", 0))
        self.port = int(listener.getsockname()[1])
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            self.port,
            size,
            is_master=True,
            timeout=_MEET_S,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def join(self, device: torch.device) -> Ranks:
        """Meet the others as rank 0."""
        return _meet(self._store, device, 0, self._size)


def _meet(store: Any, device: torch.device, rank: int, size: int) -> Ranks:
    on_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_LATEST_S,
        device_id=device if on_cuda else None,
    )
    return Ranks(rank, size)


def _gather_into(everything: Tensor, part: Tensor) -> None:
    """The newer name where there is one, since the older then warns."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everything, part)
