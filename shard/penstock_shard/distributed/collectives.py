"""Collectives over the ranks of one model; joining the group."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock_shard.errors import ModelError, first_line, is_out_of_memory

# Timeout for reaching the store. A rank may wait this long twice. Rank 0 waits _MEET_S, so that the
# rank can report why it failed.
_FIND_S = timedelta(seconds=60)
_MEET_S = 180.0
_POLL_S = 0.02
# Timeout of collectives. It is long, because steps on slow CPUs take long. The loss of a rank is
# noticed by its connection.
_LATEST_S = timedelta(hours=2)


class Ranks:
    """This process's rank in the group, and the collectives."""

    def __init__(self, rank: int, size: int, *, in_order: bool = False) -> None:
        """With `in_order`, sum in the order of ranks, so that a sum's bits do not depend on the
        rest of the step. This moves more data than an all-reduce.
        """
        self.rank = rank
        self.size = size
        self.in_order = in_order
        self._is_apart = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Skip collectives in the context: results have the right shapes but wrong values."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def add_up(self, part: Tensor) -> Tensor:
        """All-reduce in place: return the sum of all ranks' parts."""
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
        """All-gather: return all ranks' parts, [size, *shape]."""
        if self._is_apart or part.numel() == 0:
            return part.unsqueeze(0).expand(self.size, *part.shape)
        everything = part.new_empty(self.size, *part.shape)
        _gather_into(everything.view(self.size * len(part), *part.shape[1:]), part.contiguous())
        return everything

    def from_first(self, values: Tensor) -> None:
        """Broadcast: overwrite `values` with rank 0's values."""
        dist.broadcast(values, src=0)


def join(device: torch.device, rank: int, size: int, address: str, port: int) -> Ranks:
    """Join the other ranks: over NCCL on cuda, over gloo on cpu.

    Raises ModelError if that fails; rank 0 adds the rank to the message.
    """
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, size, is_master=False, timeout=_FIND_S
        )
        store.set(_arrival(rank), "")
    except RuntimeError as error:
        raise ModelError(
            f"cannot reach where the {size} ranks meet, {address}:{port}: {_what(error)}; machines "
            "must reach the first one at any port, and --master-addr be its address for them"
        ) from error
    return _meet(store, device, rank, size)


class RankRendezvous:
    """The TCPStore through which ranks join. Keep this object until `join`; then torch keeps the
    store open.
    """

    def __init__(self, size: int, *, alone: bool) -> None:
        """Open a port. `alone` is true if all ranks are on this machine. Raises ModelError if no
        port can be bound.
        """
        self._size = size
        try:
            # Use our own socket, because torch would listen on every interface.
            listener = socket.create_server(("127.0.0.1" if alone else "", 0))
            self.port = int(listener.getsockname()[1])
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1",
                self.port,
                size,
                is_master=True,
                timeout=_FIND_S,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"rank 0 of {size} cannot open a port where ranks meet: {_what(error)}"
            ) from error

    def await_others(self, check_others: Callable[[], None]) -> None:
        """Wait until all ranks have reached the store. Raises ModelError if one is late, or if
        `check_others` raises it.
        """
        deadline_s = time.monotonic() + _MEET_S
        for rank in range(1, self._size):
            while not self._store.check([_arrival(rank)]):
                check_others()
                if time.monotonic() >= deadline_s:
                    raise ModelError(
                        f"rank {rank} of {self._size} did not come to where ranks meet, port "
                        f"{self.port} of rank 0's machine, within {_MEET_S:g} s; its machine must "
                        "reach this one at any port"
                    )
                time.sleep(_POLL_S)

    def join(self, device: torch.device) -> Ranks:
        return _meet(self._store, device, 0, self._size)


def _arrival(rank: int) -> str:
    return f"arrived/{rank}"


def _meet(store: Any, device: torch.device, rank: int, size: int) -> Ranks:
    on_cuda = device.type == "cuda"
    backend = "nccl" if on_cuda else "gloo"
    # A rank waits for the other ranks, which may have to fetch the model first.
    store.set_timeout(_LATEST_S)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=_LATEST_S,
            device_id=device if on_cuda else None,
        )
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        who = "rank 0 " if rank == 0 else ""
        more = "; NCCL_DEBUG=INFO says more" if on_cuda else ""
        raise ModelError(
            f"{who}cannot exchange tensors with the {size - 1} other ranks over {backend}: "
            f"{_what(error)}; {backend.upper()}_SOCKET_IFNAME names the network{more}"
        ) from error
    return Ranks(rank, size)


def _what(error: Exception) -> str:
    """Return the error's first line. Later lines are C++ locations."""
    return first_line(error).rstrip(". ")


def _gather_into(everything: Tensor, part: Tensor) -> None:
    """Call all-gather by its newer name if torch has it, because the older name then gives a
    warning.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everything, part)
